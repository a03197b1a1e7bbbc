// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * The init of an initramfs, for a kernel that has the lab's drivers as modules.
 *
 * `init AGENT SPEC` loads /modules/00.ko and those that follow, mounts the host's file system, makes it the root and
 * becomes AGENT (guest/agent.c) there.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "share.h"

/* Standard error is the console, whose output the host saves. Without the agent's "end" the host counts the VM as lost. */
static void __attribute__((noreturn)) give_up(const char *what, const char *which)
{
	fprintf(stderr, "pagetide-early: %s %s: %s\n", what, which, strerror(errno));
	reboot(RB_POWER_OFF);
	_exit(1);
}

static void load_modules(void)
{
	for (int number = 0; ; number++) {
		char path[32];
		int fd;

		snprintf(path, sizeof(path), "/modules/%02d.ko", number);
		fd = open(path, O_RDONLY | O_CLOEXEC);
		if (fd < 0 && errno == ENOENT)
			return;
		if (fd < 0)
			give_up("open", path);
		if (syscall(SYS_finit_module, fd, "", 0))
			give_up("load", path);
		close(fd);
	}
}

int main(int argc, char **argv)
{
	if (getpid() != 1 || argc != 3) {
		fprintf(stderr, "usage: %s AGENT SPEC, as the first process of a VM\n", argv[0]);
		return 2;
	}
	load_modules();
	if (mount("/dev/root", "/root", "9p", MS_RDONLY, P9_OPTIONS))
		give_up("mount", "the host's file system");
	if (chdir("/root") || mount(".", "/", NULL, MS_MOVE, NULL) || chroot(".") || chdir("/"))
		give_up("change to", "the host's file system");
	execv(argv[1], argv + 1);
	give_up("run", argv[1]);
}
