/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* How the host's file system is mounted over 9p; xtask/src/vm/qemu.rs has the same for the kernel's own mount. */
#define P9_OPTIONS "version=9p2000.L,trans=virtio,access=any,msize=512000"
