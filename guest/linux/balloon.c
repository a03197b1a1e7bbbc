// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Gives memory up like a balloon driver: the host discards it, and it reads as zeroes.
 *
 *	balloon BYTES [ROUNDS]
 *
 * Each round (default: 1) fills BYTES with a pattern and gives up every other run of eight pages, by a line
 * "discard GPA BYTES" on ttyS1 for each range that is contiguous in physical memory. Then it checks that every
 * word that it gave up is zero, and that every other word still has the pattern. The next round fills all of
 * the memory again. The program reports a wrong word with its address, and ends with status 1.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/mman.h>
#include <termios.h>
#include <unistd.h>

#include "common.h"
#include "pagemap.h"

#define RUN_PAGES 8
#define PAGE_WORDS (PAGE_BYTES / sizeof(uint64_t))

static bool is_given_up(uint64_t page)
{
	return page / RUN_PAGES % 2;
}

/* Each word has a value of its own in each round, and none is zero. */
static uint64_t pattern(uint64_t index, uint64_t round)
{
	return (round + 1) << 56 | index;
}

static void fill(volatile uint64_t *words, uint64_t pages, uint64_t round)
{
	uint64_t i;

	for (i = 0; i < pages * PAGE_WORDS; i++)
		words[i] = pattern(i, round);
}

/* When this returns, the host has discarded the memory: it discards before the guest continues. */
static void discard(int port, uint64_t gpa, uint64_t bytes)
{
	if (dprintf(port, "discard %#llx %#llx\n", (unsigned long long)gpa,
		    (unsigned long long)bytes) < 0)
		fail("/dev/ttyS1");
	if (tcdrain(port))
		fail("tcdrain");
}

static uint64_t give_up(int port, const char *memory, uint64_t pages)
{
	uint64_t gpa = 0, bytes = 0, given_up = 0, page;

	for (page = 0; page < pages; page++) {
		uint64_t next;

		if (!is_given_up(page))
			continue;
		next = physical_address(memory + page * PAGE_BYTES);
		if (bytes && next != gpa + bytes) {
			discard(port, gpa, bytes);
			bytes = 0;
		}
		if (!bytes)
			gpa = next;
		bytes += PAGE_BYTES;
		given_up++;
	}
	if (bytes)
		discard(port, gpa, bytes);
	return given_up;
}

static void check(const volatile uint64_t *words, uint64_t pages, uint64_t round)
{
	uint64_t i;

	for (i = 0; i < pages * PAGE_WORDS; i++) {
		uint64_t wanted = is_given_up(i / PAGE_WORDS) ? 0 : pattern(i, round);
		uint64_t found = words[i];

		if (found != wanted) {
			fprintf(stderr, "balloon: %p holds %#llx, not %#llx\n", (void *)&words[i],
				(unsigned long long)found, (unsigned long long)wanted);
			exit(1);
		}
	}
}

int main(int argc, char **argv)
{
	uint64_t pages, rounds = 1, round, given_up = 0;
	char *memory;
	int port;

	if (argc < 2 || argc > 3) {
		fprintf(stderr, "usage: balloon BYTES [ROUNDS]\n");
		return 2;
	}
	pages = parse_number("BYTES", argv[1], UINT64_MAX / 2) / PAGE_BYTES;
	if (pages <= RUN_PAGES) {
		fprintf(stderr, "BYTES: not more than %d pages\n", RUN_PAGES);
		return 2;
	}
	if (argc > 2)
		rounds = parse_number("ROUNDS", argv[2], 100);

	port = open("/dev/ttyS1", O_WRONLY | O_NOCTTY | O_CLOEXEC);
	if (port < 0)
		fail("/dev/ttyS1");
	memory = mmap(NULL, pages * PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
		      -1, 0);
	if (memory == MAP_FAILED)
		fail("mmap");
	/* If a page moved, the host would discard another page. */
	if (mlock(memory, pages * PAGE_BYTES))
		fail("mlock");

	for (round = 0; round < rounds; round++) {
		fill((uint64_t *)memory, pages, round);
		given_up += give_up(port, memory, pages);
		check((uint64_t *)memory, pages, round);
	}
	printf("balloon: %llu pages given up in %llu rounds, every word right\n",
	       (unsigned long long)given_up, (unsigned long long)rounds);
	return 0;
}
