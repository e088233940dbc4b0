// CUDA C++ on a CPU, for tests: runs a kernel's source thread by thread, with warp shuffles and
// barriers, under a plain C++ compiler and its sanitizers.
//
// Each CUDA thread of a thread block is a fiber (started by ucontext, switched by setjmp, which
// costs no system call). Thread blocks run one after another. A collective that some thread never
// reaches, or that reads a lane outside its mask, ends the process with a message instead of
// hanging.
//
// It shows wrong arithmetic, wrong addresses, wrong shuffles and missing barriers between
// collectives. It cannot show races (only one fiber runs at a time), approximate hardware functions
// or speed. Compile with -ffp-contract=off: the *_rn functions promise separate roundings.
#pragma once

#include <cuda_runtime.h>
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#undef __global__
#undef __device__
#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __device__
#define __shared__ static  // one thread block at a time
#define __launch_bounds__(...)
#define __grid_constant__

namespace cuda_on_host {

inline uint3 thread_index, block_index;
inline dim3 block_size, grid_size;

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "cuda_on_host: %s in block (%u, %u, %u), thread (%u, %u, %u)\n", what,
                 block_index.x, block_index.y, block_index.z, thread_index.x, thread_index.y,
                 thread_index.z);
    std::abort();
}

// Where the lanes of a mask meet: each leaves a value and takes another's.
struct Meeting {
    const char* op = nullptr;
    unsigned arrived = 0, departed = 0;
    uint64_t values[32] = {};
};

struct Fiber {
    static constexpr size_t kStack = 256 << 10;  // sanitizers need much
    std::unique_ptr<char[]> stack{new char[kStack]};
    jmp_buf here;
    bool started = false, done = true;
    unsigned number = 0;
    uint3 index{};
    void* fake_stack = nullptr;
};

class Block {
  public:
    template <typename Body>
    void run(Body& body) {
        const unsigned count = block_size.x * block_size.y * block_size.z;
        body_ = [](void* b) { (*static_cast<Body*>(b))(); };
        argument_ = &body;
        warps_.assign((count + 31) / 32, {});
        waiting_ = 0;
        live_ = count;
        while (fibers_.size() < count) fibers_.emplace_back(new Fiber);
        for (unsigned i = 0; i < count; ++i) {
            Fiber& f = *fibers_[i];
            f.done = f.started = false;
            f.number = i;
            f.index = {i % block_size.x, i / block_size.x % block_size.y,
                       i / (block_size.x * block_size.y)};
        }
        while (live_) {
            progress_ = false;
            for (unsigned i = 0; i < count; ++i)
                if (!fibers_[i]->done) resume(*fibers_[i]);
            if (!progress_) fail("a collective is not reached by all its threads");
        }
    }

    // What lane `from` brought to this collective of the lanes in `mask`.
    uint64_t meet(const char* op, unsigned mask, uint64_t value, unsigned from) {
        const unsigned lane = current_->number % 32, bit = 1u << lane;
        if (!(mask & bit)) fail("a lane calls a collective whose mask leaves it out");
        if (!(mask >> from & 1)) fail("a shuffle reads a lane outside its mask");
        Meeting& m = warps_[current_->number / 32][mask];
        while (m.arrived & bit) yield();  // the round before has not been left by all
        if (m.arrived && std::strcmp(m.op, op)) fail("lanes meet in different collectives");
        m.op = op;
        m.arrived |= bit;
        m.values[lane] = value;
        progress_ = true;
        while (m.arrived != mask) yield();
        const uint64_t got = m.values[from];
        m.departed |= bit;
        progress_ = true;
        if (m.departed == mask) m.arrived = m.departed = 0;
        return got;
    }

    void barrier() {
        const unsigned round = rounds_;
        ++waiting_;
        progress_ = true;
        while (round == rounds_) {
            if (waiting_ == live_) {  // threads that have returned do not count, as on a GPU
                waiting_ = 0;
                ++rounds_;
                progress_ = true;
                break;
            }
            yield();
        }
    }

    unsigned lane() const { return current_->number % 32; }

  private:
    static void entry() {
        Block& block = instance();
        block.arrived_in(nullptr);
        block.body_(block.argument_);
        block.current_->done = true;
        --block.live_;
        block.progress_ = true;
        block.leave(true);
    }

    void resume(Fiber& f) {
        current_ = &f;
        thread_index = f.index;
        if (_setjmp(scheduler_)) return finished_switch();
        start_switch(&scheduler_fake_, f.stack.get(), Fiber::kStack);
        if (f.started) _longjmp(f.here, 1);
        f.started = true;
        ucontext_t context;
        getcontext(&context);
        context.uc_stack.ss_sp = f.stack.get();
        context.uc_stack.ss_size = Fiber::kStack;
        context.uc_link = nullptr;
        makecontext(&context, entry, 0);
        setcontext(&context);
    }

    void yield() {
        Fiber* self = current_;
        if (_setjmp(self->here)) return arrived_in(self->fake_stack);
        leave(false);
    }

    [[noreturn]] void leave(bool for_good) {
        start_switch(for_good ? nullptr : &current_->fake_stack, scheduler_stack_, scheduler_size_);
        _longjmp(scheduler_, 1);
    }

#if defined(__SANITIZE_ADDRESS__)
    static void start_switch(void** fake, const void* stack, size_t size) {
        __sanitizer_start_switch_fiber(fake, stack, size);
    }
    void arrived_in(void* fake) {
        __sanitizer_finish_switch_fiber(fake, &scheduler_stack_, &scheduler_size_);
    }
    void finished_switch() { __sanitizer_finish_switch_fiber(scheduler_fake_, nullptr, nullptr); }
#else
    static void start_switch(void**, const void*, size_t) {}
    void arrived_in(void*) {}
    void finished_switch() {}
#endif

  public:
    static Block& instance() {
        static Block block;
        return block;
    }

  private:
    std::vector<std::unique_ptr<Fiber>> fibers_;
    std::vector<std::map<unsigned, Meeting>> warps_;
    jmp_buf scheduler_;
    void* scheduler_fake_ = nullptr;
    const void* scheduler_stack_ = nullptr;
    size_t scheduler_size_ = 0;
    Fiber* current_ = nullptr;
    void (*body_)(void*) = nullptr;
    void* argument_ = nullptr;
    unsigned waiting_ = 0, rounds_ = 0, live_ = 0;
    bool progress_ = false;
};

template <typename Body>
void launch(dim3 grid, dim3 block, Body body) {
    grid_size = grid;
    block_size = block;
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x = 0; x < grid.x; ++x) {
                block_index = {x, y, z};
                Block::instance().run(body);
            }
}

template <typename T>
T shuffle(const char* op, unsigned mask, T value, unsigned from) {
    static_assert(sizeof(T) <= 8, "shuffles move at most 8 bytes");
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    bits = Block::instance().meet(op, mask, bits, from);
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

}  // namespace cuda_on_host

#define threadIdx cuda_on_host::thread_index
#define blockIdx cuda_on_host::block_index
#define blockDim cuda_on_host::block_size
#define gridDim cuda_on_host::grid_size

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
    const unsigned from = (cuda_on_host::Block::instance().lane() ^ unsigned(lanes)) % 32;
    return cuda_on_host::shuffle("__shfl_xor_sync", mask, value, from);
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane) {
    return cuda_on_host::shuffle("__shfl_sync", mask, value, unsigned(lane) % 32);
}

inline void __syncwarp(unsigned mask = 0xffffffffu) {
    auto& block = cuda_on_host::Block::instance();
    block.meet("__syncwarp", mask, 0, block.lane());
}

inline void __syncthreads() {
    cuda_on_host::Block::instance().barrier();
}

template <typename T>
T __ldg(const T* from) {
    return *from;
}
template <typename T>
T __ldcs(const T* from) {
    return *from;
}

inline float __fmul_rn(float a, float b) {
    return a * b;
}
inline float __fadd_rn(float a, float b) {
    return a + b;
}
inline float __fsub_rn(float a, float b) {
    return a - b;
}
inline float __fdiv_rn(float a, float b) {
    return a / b;
}
inline float __fsqrt_rn(float a) {
    return std::sqrt(a);
}
