// Lets oneDNN, and so torch, use AMX on a virtual machine that has it but hides the sizes of its tiles, where
// torch's first bf16 product ends with an illegal instruction.
//
//     cc -O1 -shared -fPIC -o tile_sizes.so bench/peers/tile_sizes.c
//     LD_PRELOAD=./tile_sizes.so python3 bench/peers/kernels.py
//
// CPUID is made to fault (Linux, on processors that can), and the handler answers it: leaves 0x1d and 0x1e with
// the sizes that every processor with AMX has, the others as the machine does.
#define _GNU_SOURCE
#include <cpuid.h>
#include <signal.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { ARCH_SET_CPUID = 0x1012, SIZES = 0x1d, MULTIPLIER = 0x1e };

static long set_cpuid(int enabled) { return syscall(SYS_arch_prctl, ARCH_SET_CPUID, enabled); }

static void answer(int signal_number, siginfo_t *info, void *context) {
    (void)info;
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *code = (const unsigned char *)registers[REG_RIP];
    if (code[0] != 0x0f || code[1] != 0xa2) { // not CPUID: a fault of the program
        signal(signal_number, SIG_DFL);
        return;
    }
    unsigned leaf = registers[REG_RAX], part = registers[REG_RCX], a, b, c, d;
    set_cpuid(1);
    __cpuid_count(leaf, part, a, b, c, d);
    set_cpuid(0);
    if (leaf == 0 && a < MULTIPLIER) a = MULTIPLIER;
    if (leaf == SIZES) { // one palette: 8 tiles of 16 rows of 64 bytes
        a = part == 0 ? 1 : part == 1 ? 8192 | 1024 << 16 : 0;
        b = part == 1 ? 64 | 8 << 16 : 0;
        c = part == 1 ? 16 : 0;
        d = 0;
    }
    if (leaf == MULTIPLIER) a = c = d = 0, b = 16 | 64 << 8;
    registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
    registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void begin(void) {
    struct sigaction action = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGSEGV, &action, NULL);
    if (set_cpuid(0) != 0) fprintf(stderr, "tile_sizes: this machine cannot make CPUID fault\n");
}
