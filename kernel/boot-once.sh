#!/bin/sh
# Has GRUB boot a kernel once, and after that again the kernel that runs now: a host that hangs is back after a reset.
# As root: sh boot-once.sh RELEASE, such as 6.12.118-pagetide; then reboot.
set -eu
new=${1:?'usage: sh boot-once.sh RELEASE, such as 6.12.118-pagetide'}
now=${2:-$(uname -r)}
# Other places are for tests.
config=${GRUB_CONFIG:-/boot/grub/grub.cfg}
defaults=${GRUB_DEFAULTS:-/etc/default/grub}

# The entry of a kernel, by the names that no translation changes.
entry() {
	menu=$(grep -o "gnulinux-advanced-[^']*" "$config" | head -n 1)
	item=$(grep -o "gnulinux-$1-advanced-[^']*" "$config" | head -n 1)
	if [ -z "$menu" ] || [ -z "$item" ]; then
		echo "$config has no entry of the kernel $1: nothing was changed but GRUB_DEFAULT in $defaults" >&2
		return 1
	fi
	echo "$menu>$item"
}

# GRUB boots what it was asked to boot once only with this default.
sed -i '/^GRUB_DEFAULT=/d' "$defaults"
echo GRUB_DEFAULT=saved >> "$defaults"
update-grub
default=$(entry "$now")
once=$(entry "$new")
grub-set-default "$default"
grub-reboot "$once"
echo "The next boot takes $new, all later ones $now. Reboot now."
echo "Where /boot/grub is on LVM, RAID, btrfs or ZFS, GRUB cannot note that it has done so, and takes $new each time."
