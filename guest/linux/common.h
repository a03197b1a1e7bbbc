/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* What the guest's programs share: sizes on the command line, and errors that end them. */
#ifndef PAGETIDE_COMMON_H
#define PAGETIDE_COMMON_H

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PAGE_BYTES 4096UL

/* A number, or one with K, M or G, from 1 to max; anything else ends the program with status 2. */
static inline uint64_t parse_number(const char *what, const char *text, uint64_t max)
{
	static const char suffixes[] = "KMG";
	const char *suffix;
	uint64_t value;
	char *end;

	errno = 0;
	value = strtoull(text, &end, 10);
	suffix = *end ? strchr(suffixes, *end) : NULL;
	if (suffix) {
		unsigned int shift = 10 * (suffix - suffixes + 1);

		if (value > UINT64_MAX >> shift)
			errno = ERANGE;
		value <<= shift;
		end++;
	}
	if (*text < '0' || *text > '9' || *end || errno || !value || value > max) {
		fprintf(stderr, "%s: '%s' is not a number from 1 to %llu\n", what, text,
			(unsigned long long)max);
		exit(2);
	}
	return value;
}

static inline void __attribute__((noreturn)) fail(const char *what)
{
	perror(what);
	exit(1);
}

#endif
