// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Consumes an uncorrected memory error: allocates memory, prints the physical address of a page, waits
 * for a line on standard input, and reads the page.
 *
 *	consume [BYTES [PAGE]]
 *
 * Prints "consume: gpa 0x..." for page PAGE, counted from 1, (default: the middle one) of BYTES
 * (default: 2M) and waits for a line on standard input. Then it reads the page and prints the result,
 * "consume: read ok" with status 0. A machine check raises SIGBUS: the program prints the signal's address
 * and then dies of the signal, like any process.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common.h"
#include "pagemap.h"

/* The error strikes at the single read below, and thus interrupts no other function of this program. */
static void on_sigbus(int number, siginfo_t *info, void *context)
{
	char text[96];
	int length = snprintf(text, sizeof(text), "consume: SIGBUS code %d at %p lsb %d\n",
			      info->si_code, info->si_addr, info->si_addr_lsb);

	(void)context;
	if (write(STDOUT_FILENO, text, length) < 0)
		_exit(1);
	/* SA_RESETHAND: this time it is fatal. */
	raise(number);
}

int main(int argc, char **argv)
{
	uint64_t bytes = 2 << 20, pages, page, i, found;
	struct sigaction action = { .sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO | SA_RESETHAND };
	volatile uint64_t *word;
	char *memory;

	if (argc > 3) {
		fprintf(stderr, "usage: consume [BYTES [PAGE]]\n");
		return 2;
	}
	if (argc > 1)
		bytes = parse_number("BYTES", argv[1], UINT64_MAX / 2);
	pages = (bytes + PAGE_BYTES - 1) / PAGE_BYTES;
	page = argc > 2 ? parse_number("PAGE", argv[2], pages) - 1 : pages / 2;

	memory = mmap(NULL, pages * PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
		      -1, 0);
	if (memory == MAP_FAILED)
		fail("mmap");
	for (i = 0; i < pages; i++)
		*(volatile uint64_t *)(memory + i * PAGE_BYTES) = i + 1;
	/* If a page moved, the printed address would be another page's. */
	if (mlock(memory, pages * PAGE_BYTES))
		fail("mlock");
	if (sigaction(SIGBUS, &action, NULL))
		fail("sigaction");

	word = (uint64_t *)(memory + page * PAGE_BYTES);
	printf("consume: gpa %#llx\n", (unsigned long long)physical_address(word));
	fflush(stdout);
	while (getchar() != '\n' && !feof(stdin))
		;

	found = *word;
	printf("consume: read %s\n", found == page + 1 ? "ok" : "something else");
	return found != page + 1;
}
