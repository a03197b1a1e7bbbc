# The workload: a bare 64-bit payload, position independent, copied into low memory.
#
# Entered in long mode with interrupts off, flat segments, rdi = the gpa of this vCPU's parameter page
# and rsp = the end of its stack. rdi never changes: the exception handler relies on it.
# Memory is identity mapped. Offsets of words and port numbers come from Rust (payload.rs).

    .section .rodata.pagetide_guest, "a", @progbits
    .balign 4096
    .globl pagetide_guest_start
pagetide_guest_start:

# Warm-up: everything but the data pages is touched once, so that no timed access faults on it.
    mov rsi, [rdi + {LOG}]                  # the latency log, one write a page
    mov rax, [rdi + {LOG_BYTES}]
    add rax, rsi
2:  cmp rsi, rax
    jae 3f
    mov dword ptr [rsi], 0
    add rsi, 4096
    jmp 2b
3:  mov rsi, [rdi + {TABLES}]               # the page tables, one read a page
    mov rax, [rdi + {TABLES_BYTES}]
    add rax, rsi
4:  cmp rsi, rax
    jae 5f
    mov rdx, [rsi]
    add rsi, 4096
    jmp 4b
5:  push 0                                  # the stack, which only exceptions use
    pop rax

    mov r8, 0                               # step of the walk
    mov r10, [rdi + {MULTIPLIER_A}]
    mov r11, [rdi + {MULTIPLIER_B}]
    mov r12, [rdi + {MASK}]
    mov r14, [rdi + {BASE}]
    mov r15, [rdi + {LOG}]
    mov rcx, [rdi + {SHIFT}]
    mov rbx, [rdi + {SEED}]
    mov rbp, [rdi + {STRIDE_BYTES}]

    mov edx, {PORT}
    mov eax, {READY}
    out dx, eax                             # returns when every vCPU is ready

    mov rax, [rdi + {MODE}]
    cmp rax, {MODE_WRITE}
    je write_next
    cmp rax, {MODE_SPIN}
    je spin
    cmp rax, {MODE_STEP}
    je step_next

# rsi = the address of this step's page; steps outside the range go to \skip.
    .macro pagetide_next_page skip
    mov rsi, r8
    imul rsi, r10
    and rsi, r12
    mov rax, rsi
    shr rax, cl
    xor rsi, rax
    imul rsi, r11
    and rsi, r12
    mov rax, rsi
    shr rax, cl
    xor rsi, rax
    cmp rsi, [rdi + {PAGES}]
    jae \skip
    imul rsi, rbp
    add rsi, r14
    .endm

# r9 = time stamp, after everything before it has completed.
    .macro pagetide_start_clock
    lfence
    rdtsc
    shl rdx, 32
    or rax, rdx
    mov r9, rax
    .endm

# Appends the cycles since r9 to the log, at most u32::MAX.
    .macro pagetide_log_cycles
    lfence
    rdtsc
    shl rdx, 32
    or rax, rdx
    sub rax, r9
    mov edx, 0xffffffff
    cmp rax, rdx
    cmova rax, rdx
    mov [r15], eax
    add r15, 4
    inc qword ptr [rdi + {TOUCHED}]         # the host's watchdog reads it
    .endm

read_next:
    pagetide_next_page read_skip
    pagetide_start_clock
    mov r13, [rsi]
    pagetide_log_cycles
    mov rax, rsi                            # pattern.rs: word(gpa, seed)
    xor rax, rbx
    imul rax, [rdi + {PATTERN_MULTIPLIER}]
    cmp rax, r13
    jne mismatch
read_skip:
    inc r8
    cmp r8, r12
    jbe read_next
    jmp done

step_next:                                  # as read_next, with an exit before each access
    pagetide_next_page step_skip
    mov edx, {PORT}
    mov eax, {STEP}
    out dx, eax                             # the host finds the address in rsi
    pagetide_start_clock
    mov r13, [rsi]
    pagetide_log_cycles
    mov rax, rsi
    xor rax, rbx
    imul rax, [rdi + {PATTERN_MULTIPLIER}]
    cmp rax, r13
    jne mismatch
step_skip:
    inc r8
    cmp r8, r12
    jbe step_next
    jmp done

write_next:
    pagetide_next_page write_skip
    mov r13, rsi
    xor r13, rbx
    imul r13, [rdi + {PATTERN_MULTIPLIER}]
    pagetide_start_clock
    mov [rsi], r13
    pagetide_log_cycles
write_skip:
    inc r8
    cmp r8, r12
    jbe write_next

done:
    mov edx, {PORT}
    mov eax, {DONE}
    out dx, eax
6:  hlt                                     # the host does not enter again
    jmp 6b

mismatch:                                   # records the first, counts all
    cmp qword ptr [rdi + {WRONG}], 0
    jne 7f
    mov [rdi + {WRONG_GPA}], rsi
    mov [rdi + {WRONG_FOUND}], r13
    mov [rdi + {WRONG_EXPECTED}], rax
7:  inc qword ptr [rdi + {WRONG}]
    cmp qword ptr [rdi + {MODE}], {MODE_STEP}
    je step_skip
    jmp read_skip

spin:
    pause
    jmp spin

# Exceptions: no handler returns. One 16-byte stub a vector pushes what the common part expects:
# [rsp] = vector, error code (0 where the processor pushes none), rip, cs, rflags, rsp, ss.
exception:
    pop rax
    mov [rdi + {EXCEPTION_VECTOR}], rax
    pop rax
    mov [rdi + {EXCEPTION_ERROR_CODE}], rax
    mov rax, [rsp]
    mov [rdi + {EXCEPTION_RIP}], rax
    mov rax, cr2
    mov [rdi + {EXCEPTION_CR2}], rax
    mov edx, {PORT}
    mov eax, {EXCEPTION}
    out dx, eax
8:  hlt
    jmp 8b

    .balign 16
    .globl pagetide_guest_vectors
pagetide_guest_vectors:
    .set pagetide_vector, 0
    .rept 32
    .balign 16
    .if ((0x60227d00 >> pagetide_vector) & 1) == 0
    push 0
    .endif
    push pagetide_vector
    jmp exception
    .set pagetide_vector, pagetide_vector + 1
    .endr
    .balign 16

    .globl pagetide_guest_end
pagetide_guest_end:
    .previous
