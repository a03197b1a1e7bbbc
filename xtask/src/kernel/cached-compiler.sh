#!/bin/sh
# COMPILER ARGUMENT...: compiles, or takes from ccache what was compiled before.
#
# Assembler files are always compiled, and the two C files that include a file by .incbin, as x86's piggy.S
# includes the compressed kernel. In its depend mode, ccache does not see that, and returned an object with another
# kernel of the same compressed size.
for argument; do
	case $argument in
	*.S | */kernel/configs.c | */kernel/kheaders.c) exec "$@" ;;
	esac
done
exec ccache "$@"
