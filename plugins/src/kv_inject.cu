// Launcher of the KV-injection kernel: the contract's checks, the choice of the instance, one
// launch. The same file is compiled by nvcc for GPUs and by a C++ compiler with cuda_on_host.h for
// the CPU.
#include "kv_inject.cuh"

namespace dflash {
namespace {

bool aligned(const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

const char* check_shapes(const DflashKvInject& p) {
    if (p.slots < 0 || p.slots > 65535) return "slots must be 0 to 65535";
    if (p.context_rows < 0 || p.block_rows < 0)
        return "context_rows and block_rows must not be negative";
    if (p.context_rows > (1 << 24) || p.block_rows > (1 << 24)) return "too many rows";
    if (p.num_layers < 1 || p.num_layers > DFLASH_KV_MAX_LAYERS)
        return "num_layers must be 1 to 16";
    if (p.num_kv_heads < 1 || p.num_kv_heads > 1024) return "num_kv_heads must be 1 to 1024";
    if (p.head_dim != 64 && p.head_dim != 128 && p.head_dim != 256)
        return "head_dim must be 64, 128 or 256";
    if (p.capacity < 1 || p.num_positions < 1) return "capacity and num_positions must be positive";
    if (p.ring && p.capacity < p.context_rows + p.block_rows)
        return "a ring must hold all rows of a step, or two of them would share a place";
    if (p.type != DFLASH_KV_BF16 && p.type != DFLASH_KV_FP16) return "type must be BF16 or FP16";
    if (p.quant < DFLASH_KV_NONE || p.quant > DFLASH_KV_NVFP4)
        return "quant must be NONE, FP8 or NVFP4";
    const int64_t width = int64_t(p.num_kv_heads) * p.head_dim;
    if (p.context_stride < width || p.context_stride % 8)
        return "context_stride must be a multiple of 8 and at least num_kv_heads * head_dim";
    if (p.block_rows && (p.block_stride < width || p.block_stride % 8))
        return "block_stride must be a multiple of 8 and at least num_kv_heads * head_dim";
    return nullptr;
}

const char* check_pointers(const DflashKvInject& p) {
    if (!p.length || !p.committed || !p.cos || !p.sin)
        return "length, committed, cos and sin must not be null";
    if (!aligned(p.cos) || !aligned(p.sin)) return "cos and sin must be aligned to 16 bytes";
    if (p.quant != DFLASH_KV_NONE && !p.scale) return "a quantized cache needs scale";
    for (int layer = 0; layer < p.num_layers; ++layer)
        if (!aligned(p.k_norm[layer])) return "k_norm must be aligned to 16 bytes";
    for (int pair = 0; pair < 2 * p.num_layers; ++pair) {
        if (!p.context[pair] || !p.cache[pair] || (p.block_rows && !p.block[pair]))
            return "context, block and cache must not be null";
        if (!aligned(p.context[pair]) || !aligned(p.cache[pair]) ||
            (p.block_rows && !aligned(p.block[pair])))
            return "context, block and cache must be aligned to 16 bytes";
        if (p.quant == DFLASH_KV_NVFP4 && !p.cache_scale[pair]) return "NVFP4 needs cache_scale";
    }
    return nullptr;
}

template <typename T, int D, DflashKvQuant Q>
cudaError_t run(const DflashKvInject& p, cudaStream_t stream) {
    constexpr int kLines = kThreads / (D / 16);
    const unsigned lines = 2u * p.num_layers * p.num_kv_heads;
    const dim3 grid(p.context_rows + p.block_rows, (lines + kLines - 1) / kLines, p.slots);
    DFLASH_LAUNCH((kv_inject<T, D, Q>), grid, dim3(kThreads), stream, p);
#ifdef __CUDACC__
    return cudaGetLastError();
#else
    return cudaSuccess;
#endif
}

template <typename T, int D>
cudaError_t for_quant(const DflashKvInject& p, cudaStream_t stream) {
    switch (p.quant) {
        case DFLASH_KV_NONE: return run<T, D, DFLASH_KV_NONE>(p, stream);
        case DFLASH_KV_FP8: return run<T, D, DFLASH_KV_FP8>(p, stream);
        default: return run<T, D, DFLASH_KV_NVFP4>(p, stream);
    }
}

template <typename T>
cudaError_t for_head_dim(const DflashKvInject& p, cudaStream_t stream) {
    switch (p.head_dim) {
        case 64: return for_quant<T, 64>(p, stream);
        case 128: return for_quant<T, 128>(p, stream);
        default: return for_quant<T, 256>(p, stream);
    }
}

// Whether the current device converts to e2m1 in hardware.
cudaError_t check_nvfp4() {
#ifdef __CUDACC__
    int device = 0, major = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess)
        status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (status != cudaSuccess) return status;
    return major >= 10 ? cudaSuccess : cudaErrorNotSupported;
#else
    return cudaSuccess;
#endif
}

}  // namespace
}  // namespace dflash

const char* dflash_kv_inject_check(const DflashKvInject* launch) {
    if (!launch) return "no launch";
    const char* wrong = dflash::check_shapes(*launch);
    return wrong ? wrong : dflash::check_pointers(*launch);
}

cudaError_t dflash_kv_inject(const DflashKvInject* launch, cudaStream_t stream) {
    if (dflash_kv_inject_check(launch)) return cudaErrorInvalidValue;
    if (launch->slots == 0 || launch->context_rows + launch->block_rows == 0) return cudaSuccess;
    if (launch->quant == DFLASH_KV_NVFP4)
        if (const cudaError_t status = dflash::check_nvfp4(); status != cudaSuccess) return status;
    return launch->type == DFLASH_KV_BF16 ? dflash::for_head_dim<__nv_bfloat16>(*launch, stream)
                                          : dflash::for_head_dim<__half>(*launch, stream);
}
