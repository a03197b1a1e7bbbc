# The walker: a bare 64-bit payload, position independent, copied into low memory.
#
# Entered as workload.s is: long mode, interrupts off, rdi = this vCPU's parameter page, which
# never changes (the exception handler, workload.s's, relies on it). Memory is identity mapped.
#
# It walks the pages of a table, again and again. On each page it compares the first word, which is the
# page's own address and is never written, and this vCPU's own word, which holds the number of the last
# round; then it writes the number of this round. After each page it computes its stall since the page
# before: the time that passed less the time that was stolen.

    .section .rodata.pagetide_walker, "a", @progbits
    .balign 16
    .globl pagetide_walker_start
pagetide_walker_start:
    mov r11d, {CONTROL}
    mov r12, [rdi + {TABLE}]
    mov r15, [rdi + {COLUMN}]
    mov r10, [r11 + {WINDOW}]
    mov r14d, 0                             # rounds
    mov rbp, [rdi + {STEAL}]                # stolen so far
    lfence
    rdtsc
    shl rdx, 32
    or rax, rdx
    mov rbx, rax                            # time stamp

walker_round:
    mov r13d, 0
walker_page:
    cmp qword ptr [rdi + {TOUCH}], 0
    je walker_clock
    mov rsi, [r12 + 8*r13]
    mov rax, [rsi]
    mov rcx, rsi
    cmp rax, rsi
    jne walker_wrong_page
walker_own:
    mov rax, [rsi + r15]
    mov rcx, r14
    cmp rax, r14
    jne walker_wrong_own
walker_write:
    lea rax, [r14 + 1]
    mov [rsi + r15], rax

# The time stamp and the stolen time belong together if no time was stolen in between: KVM updates the
# stolen time before it enters the guest.
walker_clock:
    mov r8, [rdi + {STEAL}]
    lfence
    rdtsc
    shl rdx, 32
    or rax, rdx
    cmp r8, [rdi + {STEAL}]
    jne walker_clock
    mov r9, rax
    sub rax, rbx
    mov rbx, r9
    mul qword ptr [rdi + {SCALE}]           # cycles to nanoseconds, 32 binary places
    shrd rax, rdx, 32
    mov rcx, r8
    sub rcx, rbp
    mov rbp, r8
    sub rax, rcx                            # stall = passed - stolen, at least 0
    jnc 1f
    mov eax, 0
1:  mov rcx, [r11 + {WINDOW}]               # a new window begins with this stretch
    cmp rcx, r10
    je 2f
    mov r10, rcx
    mov qword ptr [rdi + {LONGEST}], 0
2:  cmp rax, [rdi + {LONGEST}]
    jbe 3f
    mov [rdi + {LONGEST}], rax
3:  inc qword ptr [rdi + {STEPS}]
    inc r13
    cmp r13, [rdi + {COUNT}]
    jb walker_page
    inc r14
    mov [rdi + {ROUNDS}], r14
    cmp qword ptr [r11 + {STOP}], 0
    je walker_round
    mov edx, {PORT}
    mov eax, {DONE}
    out dx, eax
4:  hlt                                     # the host does not enter again
    jmp 4b

# rsi = page, rax = found, rcx = expected: records the first, counts all.
    .macro pagetide_wrong back
    cmp qword ptr [rdi + {WRONG}], 0
    jne 5f
    mov [rdi + {WRONG_GPA}], rsi
    mov [rdi + {WRONG_FOUND}], rax
    mov [rdi + {WRONG_EXPECTED}], rcx
5:  inc qword ptr [rdi + {WRONG}]
    jmp \back
    .endm
walker_wrong_page:
    pagetide_wrong walker_own
walker_wrong_own:
    pagetide_wrong walker_write

    .globl pagetide_walker_end
pagetide_walker_end:
    .previous
