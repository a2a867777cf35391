/* Preloaded, it makes a newer x86 CPU look like one with AVX2 but without AVX-512 and AMX, on Linux.
 *
 *     cc -O2 -shared -fPIC -o avx2.so bench/avx2.c -ldl && LD_PRELOAD=$PWD/avx2.so make demo
 *
 * The kernel lets CPUID fault (cpuid_fault in /proc/cpuinfo). The handler answers without those features, so that
 * PyTorch, MKL, oneDNN, numba and vLLM choose the code that they have for AVX2: environment variables reach only the
 * first three. libc has chosen its own, for copies of memory, before this is loaded. */
#define _GNU_SOURCE
#include <asm/prctl.h>
#include <dlfcn.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

typedef int (*set_action)(int, const struct sigaction *, struct sigaction *);
typedef void (*handler)(int);
static struct sigaction others; /* what the program itself wants of SIGSEGV, such as Python's faulthandler */

static void faults(int on) { syscall(SYS_arch_prctl, ARCH_SET_CPUID, !on); }
static set_action system_action(void) { return (set_action)dlsym(RTLD_NEXT, "sigaction"); }
static unsigned bits(int n, const int *list) {
  unsigned all = 0;
  while (n--) all |= 1u << list[n];
  return all;
}
#define BITS(...) bits(sizeof((int[]){__VA_ARGS__}) / sizeof(int), (int[]){__VA_ARGS__})

static void answer(int number, siginfo_t *info, void *context) {
  greg_t *r = ((ucontext_t *)context)->uc_mcontext.gregs;
  unsigned char *code = (unsigned char *)r[REG_RIP];
  if (info->si_code == SI_KERNEL && code[0] == 0x0f && code[1] == 0xa2) {
    unsigned leaf = r[REG_RAX], part = r[REG_RCX], a, b, c, d;
    faults(0);
    __asm__ volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(leaf), "c"(part));
    faults(1);
    if (leaf == 7 && part == 0) {
      b &= ~BITS(16, 17, 21, 26, 27, 28, 30, 31);
      c &= ~BITS(1, 6, 11, 12, 14);
      d &= ~BITS(2, 3, 8, 22, 23, 24, 25);
    } else if (leaf == 7 && part == 1) { /* the same for AVX-VNNI and AVX-NE-CONVERT */
      a &= ~BITS(4, 5, 21, 23);
      d = 0;
    } else if (leaf == 0x1d || leaf == 0x1e) {
      a = b = c = d = 0;
    }
    r[REG_RAX] = a, r[REG_RBX] = b, r[REG_RCX] = c, r[REG_RDX] = d, r[REG_RIP] += 2;
  } else if (others.sa_flags & SA_SIGINFO && others.sa_sigaction) {
    others.sa_sigaction(number, info, context);
  } else if (others.sa_handler != SIG_DFL && others.sa_handler != SIG_IGN) {
    others.sa_handler(number);
  } else {
    struct sigaction plain = {.sa_handler = SIG_DFL};
    system_action()(SIGSEGV, &plain, NULL);
  }
}

int sigaction(int number, const struct sigaction *new, struct sigaction *old) {
  if (number != SIGSEGV) return system_action()(number, new, old);
  struct sigaction before = others;
  if (new) others = *new;
  if (old) *old = before;
  return 0;
}

handler signal(int number, handler new) {
  struct sigaction after = {.sa_handler = new, .sa_flags = SA_RESTART}, before;
  return sigaction(number, &after, &before) ? SIG_ERR : before.sa_handler;
}

__attribute__((constructor)) static void start(void) {
  struct sigaction ours = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};
  system_action()(SIGSEGV, &ours, NULL);
  faults(1);
}
