/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * Records where functions are entered. The compiler calls mcount at the beginning of each (rustc's
 * -Zinstrument-mcount); the program's end writes the addresses of these calls, in their order, to the
 * file that $PAGETIDE_TRACE names.
 */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#define MOST ((size_t)1 << 20)

static void *entered[MOST];
static atomic_size_t count;

void mcount(void)
{
	size_t at = atomic_fetch_add(&count, 1);

	if (at < MOST)
		entered[at] = __builtin_return_address(0);
}

__attribute__((destructor)) static void write_out(void)
{
	const char *name = getenv("PAGETIDE_TRACE");
	FILE *file = name ? fopen(name, "w") : NULL;
	size_t end = atomic_load(&count);

	if (!file || end > MOST) {
		fputs("mcount: no file in $PAGETIDE_TRACE, or too many calls\n", stderr);
		_Exit(3);
	}
	for (size_t at = 0; at < end; at++)
		fprintf(file, "%p\n", entered[at]);
	fclose(file);
}
