// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Threads cycle through memory: each reads every 64-bit word of its own part, compares it with the value
 * that the thread wrote in the round before, and writes the next value.
 *
 *	memcycler THREADS BYTES SECONDS [huge]
 *
 * Prints the words per microsecond of all threads together each second, and the mean at the end.
 * Each thread has an equal part of BYTES; "huge" requests transparent huge pages. The program reports a
 * wrong word with its address, and ends with status 1.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "common.h"

#define MAX_THREADS 1024
/* After so many words a thread updates its counter, which the main thread reads. */
#define BLOCK_WORDS 8192UL

struct cycler {
	pthread_t thread;
	uint64_t *words;
	uint64_t nr_words;
	_Atomic uint64_t done;
} __attribute__((aligned(128)));

static struct cycler cyclers[MAX_THREADS];
static atomic_bool stop;

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000ULL + now.tv_nsec;
}

/* Each word has a value of its own, so a page in the wrong place is an error, too. */
static uint64_t expected(uint64_t index, uint64_t round)
{
	return round ? index + round : 0;
}

static void *cycle(void *argument)
{
	struct cycler *me = argument;
	volatile uint64_t *words = me->words;
	uint64_t round, start, end, i;

	for (round = 0;; round++) {
		for (start = 0; start < me->nr_words; start = end) {
			end = start + BLOCK_WORDS;
			if (end > me->nr_words)
				end = me->nr_words;
			for (i = start; i < end; i++) {
				uint64_t found = words[i];

				if (found != expected(i, round)) {
					fprintf(stderr, "memcycler: %p holds %#llx, not %#llx\n",
						(void *)&words[i], (unsigned long long)found,
						(unsigned long long)expected(i, round));
					exit(1);
				}
				words[i] = expected(i, round + 1);
			}
			me->done += end - start;
			if (stop)
				return NULL;
		}
	}
}

static uint64_t words_done(unsigned int threads)
{
	uint64_t sum = 0;
	unsigned int i;

	for (i = 0; i < threads; i++)
		sum += cyclers[i].done;
	return sum;
}

int main(int argc, char **argv)
{
	uint64_t bytes, part, start_ns, last_ns, ns, last = 0, done;
	unsigned int threads, seconds, i;
	bool huge = argc == 5 && !strcmp(argv[4], "huge");
	int error;
	char *memory;

	if (argc != 4 && !huge) {
		fprintf(stderr, "usage: memcycler THREADS BYTES SECONDS [huge]\n");
		return 2;
	}
	threads = parse_number("THREADS", argv[1], MAX_THREADS);
	bytes = parse_number("BYTES", argv[2], UINT64_MAX / 2);
	seconds = parse_number("SECONDS", argv[3], 1000000);
	part = bytes / threads / PAGE_BYTES * PAGE_BYTES;
	if (!part) {
		fprintf(stderr, "BYTES: less than a page for each thread\n");
		return 2;
	}

	memory = mmap(NULL, part * threads, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		fail("mmap");
	if (huge && madvise(memory, part * threads, MADV_HUGEPAGE))
		fail("MADV_HUGEPAGE");

	start_ns = last_ns = now_ns();
	for (i = 0; i < threads; i++) {
		struct cycler *cycler = &cyclers[i];

		cycler->words = (uint64_t *)(memory + i * part);
		cycler->nr_words = part / sizeof(uint64_t);
		error = pthread_create(&cycler->thread, NULL, cycle, cycler);
		if (error) {
			errno = error;
			fail("pthread_create");
		}
	}
	for (i = 0; i < seconds; i++) {
		sleep(1);
		ns = now_ns();
		done = words_done(threads);
		printf("memcycler: %.2f words/us\n", (done - last) * 1000.0 / (ns - last_ns));
		fflush(stdout);
		last = done;
		last_ns = ns;
	}
	stop = true;
	for (i = 0; i < threads; i++)
		pthread_join(cyclers[i].thread, NULL);
	printf("memcycler: mean %.2f words/us, %u threads, %llu bytes, every word right\n",
	       words_done(threads) * 1000.0 / (now_ns() - start_ns), threads,
	       (unsigned long long)part * threads);
	return 0;
}
