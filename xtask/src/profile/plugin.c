/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * A plugin of QEMU's software CPU: counts how often each translation block is executed inside the
 * windows that crates/testbed/src/window.rs marks.
 *
 * Options: out=FILE, where the counters go; skip=N, how many windows to leave out first. Written for
 * QEMU 7.2, plugin API version 1. Debian's package has no qemu-plugin.h, so the few functions used are
 * declared here. Needs one thread for all CPUs (thread=single): nothing is locked.
 */
#include <inttypes.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t plugin_id;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
enum { INLINE_ADD_U64 = 0, CB_NO_REGS = 0 };

void qemu_plugin_register_vcpu_tb_trans_cb(plugin_id,
		void (*)(plugin_id, struct qemu_plugin_tb *));
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb *);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *, size_t);
const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *);
size_t qemu_plugin_insn_size(const struct qemu_plugin_insn *);
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *, int, void *, uint64_t);
void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *,
		void (*)(unsigned int, void *), int, void *);
void qemu_plugin_register_atexit_cb(plugin_id, void (*)(plugin_id, void *), void *);

#define EXPORTED __attribute__((visibility("default")))

EXPORTED int qemu_plugin_version = 1;

static const uint8_t BEGIN[] = { 0x4d, 0x87, 0xed };	/* xchg r13, r13 */
static const uint8_t END[] = { 0x4d, 0x87, 0xf6 };	/* xchg r14, r14 */

/* A block, found by its address and length: it is translated anew now and then. */
struct block {
	struct block *same_bucket, *next;
	uint64_t address, instructions;
	uint64_t executed;	/* written to by translated code: never moves */
	uint64_t at_begin, at_end;
	uint64_t counted;	/* in the windows that are over */
};

static struct block *buckets[1 << 16], *blocks;
static const char *out_path;
static uint64_t to_skip, windows;
static bool begun, ended;

static void *need(void *memory)
{
	if (!memory) {
		fputs("profile plugin: out of memory\n", stderr);
		abort();
	}
	return memory;
}

static struct block *find(uint64_t address, uint64_t instructions)
{
	uint64_t hash = (address ^ instructions << 48) * UINT64_C(0x9e3779b97f4a7c15);
	struct block **bucket = &buckets[hash >> 48];
	struct block *block;

	for (block = *bucket; block; block = block->same_bucket)
		if (block->address == address && block->instructions == instructions)
			return block;
	block = need(calloc(1, sizeof(*block)));
	block->address = address;
	block->instructions = instructions;
	block->same_bucket = *bucket;
	*bucket = block;
	block->next = blocks;
	blocks = block;
	return block;
}

/* The last window is over: nobody can tell before the next one, since the last of several ends counts. */
static void add_window(void)
{
	struct block *block;

	if (!begun || !ended)
		return;
	begun = ended = false;
	if (to_skip) {
		to_skip--;
		return;
	}
	windows++;
	for (block = blocks; block; block = block->next)
		if (block->at_end > block->at_begin)	/* else made after the end */
			block->counted += block->at_end - block->at_begin;
}

static void at_begin(unsigned int cpu, void *unused)
{
	struct block *block;

	(void)cpu;
	(void)unused;
	add_window();
	for (block = blocks; block; block = block->next)
		block->at_begin = block->at_end = block->executed;
	begun = true;
}

static void at_end(unsigned int cpu, void *unused)
{
	struct block *block;

	(void)cpu;
	(void)unused;
	for (block = blocks; block; block = block->next)
		block->at_end = block->executed;
	ended = true;
}

static bool is(const struct qemu_plugin_insn *insn, const uint8_t *bytes, size_t size)
{
	return qemu_plugin_insn_size(insn) == size &&
	       !memcmp(qemu_plugin_insn_data(insn), bytes, size);
}

static void translated(plugin_id id, struct qemu_plugin_tb *tb)
{
	uint64_t address = qemu_plugin_tb_vaddr(tb);
	size_t count = qemu_plugin_tb_n_insns(tb), i;

	(void)id;
	qemu_plugin_register_vcpu_tb_exec_inline(tb, INLINE_ADD_U64,
						 &find(address, count)->executed, 1);
	if (address >> 47)	/* the kernel's half: no marks */
		return;
	for (i = 0; i < count; i++) {
		struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, i);

		if (is(insn, BEGIN, sizeof(BEGIN)))
			qemu_plugin_register_vcpu_insn_exec_cb(insn, at_begin, CB_NO_REGS, NULL);
		else if (is(insn, END, sizeof(END)))
			qemu_plugin_register_vcpu_insn_exec_cb(insn, at_end, CB_NO_REGS, NULL);
	}
}

/* One line `windows N`, then a line for each block: address, instructions, executions; then `end`. */
static void write_out(plugin_id id, void *unused)
{
	struct block *block;
	FILE *file;

	(void)id;
	(void)unused;
	add_window();
	file = fopen(out_path, "w");
	if (!file) {
		perror(out_path);
		return;
	}
	fprintf(file, "windows %" PRIu64 "\n", windows);
	for (block = blocks; block; block = block->next)
		if (block->counted)
			fprintf(file, "%" PRIx64 " %" PRIu64 " %" PRIu64 "\n", block->address,
				block->instructions, block->counted);
	fputs("end\n", file);
	if (fclose(file))
		perror(out_path);
}

EXPORTED int qemu_plugin_install(plugin_id id, const void *info, int argc, char **argv)
{
	int i;

	(void)info;
	for (i = 0; i < argc; i++) {
		if (!strncmp(argv[i], "out=", 4))
			out_path = need(strdup(argv[i] + 4));
		else if (!strncmp(argv[i], "skip=", 5))
			to_skip = strtoull(argv[i] + 5, NULL, 10);
	}
	if (!out_path) {
		fputs("profile plugin: out=FILE is missing\n", stderr);
		return -1;
	}
	qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
	qemu_plugin_register_atexit_cb(id, write_out, NULL);
	return 0;
}
