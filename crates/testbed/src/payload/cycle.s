# The cycler: a bare 64-bit payload, position independent, copied into low memory.
#
# Entered as workload.s is: long mode, interrupts off, rdi = this vCPU's parameter page, which never
# changes (the exception handler, workload.s's, relies on it). Memory is identity mapped.
#
# It cycles through the words of its part of memory. Each word holds its own address, with the number of
# the round in the upper 16 bits: the payload reads the word, compares it and writes the next number.
# A table has a byte for each page: not 0 means that the page is lost, and is skipped. When the host finds
# that the access under way has lost its memory, it marks the page and continues the vCPU at cycler_lost;
# no other instruction touches data memory.

    .section .rodata.pagetide_cycler, "a", @progbits
    .balign 16
    .globl pagetide_cycler_start
pagetide_cycler_start:
    mov r11d, {CONTROL}
    mov r9, 1
    shl r9, 48                              # what a round adds to a word
    mov r12, [rdi + {TABLE}]
    mov r14d, 0                             # the round, in the upper 16 bits

cycler_round:
    mov r13d, 0                             # page
    mov r15, [rdi + {FIRST}]                # its address
cycler_page:
    cmp byte ptr [r12 + r13], 0
    jne cycler_next
    mov rsi, r15
    lea rbp, [r15 + 4096]
    mov r8, r15
    or r8, r14                              # what the word should be

    .globl pagetide_cycler_touches
pagetide_cycler_touches:
cycler_word:
    mov rax, [rsi]
    cmp rax, r8
    jne cycler_wrong
cycler_write:
    lea rax, [r8 + r9]
    mov [rsi], rax
    .globl pagetide_cycler_touched
pagetide_cycler_touched:
    add rsi, 8
    add r8, 8
    cmp rsi, rbp
    jb cycler_word
    add qword ptr [rdi + {WORDS}], 512
    .globl pagetide_cycler_lost
pagetide_cycler_lost:
cycler_next:
    inc qword ptr [rdi + {STEPS}]
    add r15, 4096
    inc r13
    mov [rdi + {PAGE}], r13
    cmp qword ptr [r11 + {STOP}], 0
    jne cycler_stop
    cmp r13, [rdi + {COUNT}]
    jb cycler_page
    add r14, r9
    inc qword ptr [rdi + {ROUNDS}]
    jmp cycler_round

# PAGE is the next page of this round; all pages before it have this round's number.
cycler_stop:
    mov edx, {PORT}
    mov eax, {DONE}
    out dx, eax
4:  hlt                                     # the host does not enter again
    jmp 4b

# Records the first, counts all.
cycler_wrong:
    cmp qword ptr [rdi + {WRONG}], 0
    jne 5f
    mov [rdi + {WRONG_GPA}], rsi
    mov [rdi + {WRONG_FOUND}], rax
    mov [rdi + {WRONG_EXPECTED}], r8
5:  inc qword ptr [rdi + {WRONG}]
    jmp cycler_write

    .globl pagetide_cycler_end
pagetide_cycler_end:
    .previous
