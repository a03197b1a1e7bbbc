/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* Where a program's own memory is in the guest's physical memory; for root. */
#ifndef PAGETIDE_PAGEMAP_H
#define PAGETIDE_PAGEMAP_H

#include <fcntl.h>
#include <unistd.h>

#include "common.h"

/* A pagemap entry: Documentation/admin-guide/mm/pagemap.rst. */
#define PAGEMAP_PRESENT (1ULL << 63)
#define PAGEMAP_PFN ((1ULL << 55) - 1)

static inline uint64_t physical_address(const volatile void *at)
{
	uint64_t entry;
	int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		fail("/proc/self/pagemap");
	if (pread(fd, &entry, sizeof(entry), (uintptr_t)at / PAGE_BYTES * sizeof(entry)) !=
	    sizeof(entry))
		fail("/proc/self/pagemap");
	close(fd);
	if (!(entry & PAGEMAP_PRESENT) || !(entry & PAGEMAP_PFN)) {
		fprintf(stderr, "no physical address: not root, or not present\n");
		exit(1);
	}
	return (entry & PAGEMAP_PFN) * PAGE_BYTES;
}

#endif
