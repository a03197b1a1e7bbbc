# Thin names over `cargo xtask`; `cargo xtask --help` says more.

ifeq ($(shell command -v cargo),)
$(error cargo is not installed: https://rustup.rs has it, the rest is installed when it is needed)
endif

.PHONY: demo test kernel bench report patches

demo:    ## page a VM's memory in with and without exits; a table and a page
	@cargo xtask demo

test:    ## what every change must pass; the last line counts
	@cargo xtask test

kernel:  ## build the patched kernel
	@cargo xtask kernel build

bench:   ## take the main measurements of SPECIFICATION.md
	@cargo xtask bench

report:  ## print the places of the measurements' pages
	@cargo xtask report

patches: ## write the work tree's commits back to kernel/patches
	@cargo xtask kernel export
