# Thin names over `cargo xtask`; `cargo xtask --help` says more.

ifeq ($(shell command -v cargo),)
$(error cargo is not installed: https://rustup.rs has it, the rest is installed when it is needed)
endif

.PHONY: demo test kernel bench report patches

demo:    ## page memory in with and without exits; a table and a page in a few minutes
	@cargo xtask demo

test:    ## everything that must hold; the last line counts
	@cargo xtask test

kernel:  ## build the patched kernel
	@cargo xtask kernel build

bench:   ## the measurements of SPECIFICATION.md
	@cargo xtask bench

report:  ## where the measurements' pages are
	@cargo xtask report

patches: ## the work tree's commits back to kernel/patches
	@cargo xtask kernel export
