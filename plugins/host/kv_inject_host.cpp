// The kernel and its launcher, compiled for the CPU.
#include "../src/kv_inject.cu"
