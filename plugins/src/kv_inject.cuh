// The fused KV-injection kernel: k_norm, rotary embedding, quantization and the compacted scatter
// into all caches, in one pass over the projected keys and values.
//
// A *line* is one head of one key or value of one token: D elements. D / 16 lanes share a line;
// lane j owns elements 8j .. 8j+7 and the same of the upper half, so both partners of every
// rotation are in one thread and all bulk accesses are 16 bytes. A thread block holds lines of one
// token only: what depends on the token (position, rejected or not) is the same for all its
// threads.
//
// Contract: float operations are correctly rounded and never contracted (__fmul_rn and the like),
// so a CPU, NumPy and every GPU compute the same bits. Keep it: tests compare with memcmp.
#pragma once

#ifdef __CUDACC__
#define DFLASH_LAUNCH(kernel, grid, block, stream, ...) \
    kernel<<<grid, block, 0, stream>>>(__VA_ARGS__)
#else
#include "cuda_on_host.h"
#define DFLASH_LAUNCH(kernel, grid, block, stream, ...) \
    (void)(stream), cuda_on_host::launch(grid, block, [=] { kernel(__VA_ARGS__); })
#endif

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp4.h>
#include <cuda_fp8.h>
#include <cfloat>

#include "kv_inject.h"

namespace dflash {

constexpr int kThreads = 128;
constexpr unsigned kAllLanes = 0xffffffffu;

// Elements 8j .. 8j+7 of a line, and their partners half a line further.
struct Piece {
    float low[8];
    float high[8];
};

__device__ inline float2 to_floats(__nv_bfloat162 x) {
    return __bfloat1622float2(x);
}
__device__ inline float2 to_floats(__half2 x) {
    return __half22float2(x);
}

template <typename T>
struct Pair;
template <>
struct Pair<__nv_bfloat16> {
    using type = __nv_bfloat162;
    static __device__ type round(float x, float y) { return __floats2bfloat162_rn(x, y); }
};
template <>
struct Pair<__half> {
    using type = __half2;
    static __device__ type round(float x, float y) { return __floats2half2_rn(x, y); }
};

// Eight 16-bit elements and their float values.
template <typename T>
__device__ inline void unpack(const uint4& raw, float (&x)[8]) {
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        typename Pair<T>::type pair;
        memcpy(static_cast<void*>(&pair), &words[i], sizeof pair);
        const float2 f = to_floats(pair);
        x[2 * i] = f.x;
        x[2 * i + 1] = f.y;
    }
}

template <typename T>
__device__ inline uint4 pack(const float (&x)[8]) {
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const auto pair = Pair<T>::round(x[2 * i], x[2 * i + 1]);
        memcpy(&words[i], &pair, sizeof pair);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ inline void load8(const float* from, float (&x)[8]) {
    const float4 a = __ldg(reinterpret_cast<const float4*>(from));
    const float4 b = __ldg(reinterpret_cast<const float4*>(from) + 1);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
    x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

__device__ inline float sum_of_squares(const float (&x)[8]) {
    float sum = __fmul_rn(x[0], x[0]);
#pragma unroll
    for (int i = 1; i < 8; ++i) sum = __fadd_rn(sum, __fmul_rn(x[i], x[i]));
    return sum;
}

__device__ inline void scale8(float (&x)[8], float by, const float* weight) {
    float w[8];
    load8(weight, w);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = __fmul_rn(__fmul_rn(x[i], by), w[i]);
}

// x / rms(x) * weight over the line. `lanes` is the mask of the lanes that share it.
template <int D>
__device__ inline void rms_norm(Piece& piece, const float* weight, float eps, int lane,
                                unsigned lanes) {
    float sum = __fadd_rn(sum_of_squares(piece.low), sum_of_squares(piece.high));
#pragma unroll
    for (int step = 1; step < D / 16; step *= 2)
        sum = __fadd_rn(sum, __shfl_xor_sync(lanes, sum, step));
    const float mean = __fmul_rn(sum, 1.0f / D);  // exact: D is a power of two
    const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
    scale8(piece.low, inverse, weight + 8 * lane);
    scale8(piece.high, inverse, weight + D / 2 + 8 * lane);
}

__device__ inline void rotate(Piece& piece, const float* cos, const float* sin) {
    float c[8], s[8];
    load8(cos, c);
    load8(sin, s);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float low = piece.low[i], high = piece.high[i];
        piece.low[i] = __fsub_rn(__fmul_rn(low, c[i]), __fmul_rn(high, s[i]));
        piece.high[i] = __fadd_rn(__fmul_rn(high, c[i]), __fmul_rn(low, s[i]));
    }
}

__device__ inline unsigned fp8x4(const float* x, float by) {
    unsigned word = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float2 pair = make_float2(__fmul_rn(x[2 * i], by), __fmul_rn(x[2 * i + 1], by));
        word |= unsigned(__nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3)) << 16 * i;
    }
    return word;
}

__device__ inline unsigned fp4x8(const float (&x)[8], float by) {
    unsigned word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = make_float2(__fmul_rn(x[2 * i], by), __fmul_rn(x[2 * i + 1], by));
        word |= unsigned(__nv_cvt_float2_to_fp4x2(pair, __NV_E2M1, cudaRoundNearest)) << 8 * i;
    }
    return word;
}

// Neighbours swap: an even lane gets the low words of both, an odd lane the high words of both, in
// order of the elements. So each stores one run twice as long.
__device__ inline uint2 exchange(unsigned low, unsigned high, bool odd) {
    const unsigned got = __shfl_xor_sync(kAllLanes, odd ? low : high, 1);
    return odd ? make_uint2(got, high) : make_uint2(low, got);
}

// e4m3 elements of the line; `line` points at its first byte.
template <int D>
__device__ inline void store_fp8(const Piece& piece, float scale, uint8_t* line, int lane,
                                 bool live) {
    const float by = __fdiv_rn(1.0f, scale);
    const bool odd = lane & 1;
    const uint2 a = exchange(fp8x4(piece.low, by), fp8x4(piece.high, by), odd);
    const uint2 b = exchange(fp8x4(piece.low + 4, by), fp8x4(piece.high + 4, by), odd);
    uint8_t* to = line + (odd ? D / 2 : 0) + 16 * (lane / 2);
    if (live) *reinterpret_cast<uint4*>(to) = make_uint4(a.x, b.x, a.y, b.y);
}

__device__ inline float largest(const float (&x)[8]) {
    float result = fabsf(x[0]);
#pragma unroll
    for (int i = 1; i < 8; ++i) result = fmaxf(result, fabsf(x[i]));  // a NaN is passed over
    return fmaxf(result, __shfl_xor_sync(kAllLanes, result, 1));
}

__device__ inline float e4m3_to_float(__nv_fp8_storage_t x) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(x, __NV_E4M3)));
}

// The e4m3 scale of 16 elements with the largest magnitude `amax`, and the factor that takes them
// into e2m1's range. A block whose scale vanishes becomes zeros.
__device__ inline float block_factor(float amax, float scale, float inverse_scale,
                                     __nv_fp8_storage_t& block_scale) {
    const float wanted = __fmul_rn(__fmul_rn(amax, 1.0f / 6.0f), inverse_scale);
    block_scale = __nv_cvt_float_to_fp8(wanted, __NV_SATFINITE, __NV_E4M3);
    const float unit = __fmul_rn(e4m3_to_float(block_scale), scale);
    return unit >= FLT_MIN ? __fdiv_rn(1.0f, unit) : 0.0f;
}

// e2m1 elements and block scales of the line; both pointers at its first byte.
template <int D>
__device__ inline void store_nvfp4(const Piece& piece, float scale, uint8_t* line,
                                   uint8_t* block_scales, int lane, bool live) {
    const float inverse_scale = __fdiv_rn(1.0f, scale);
    const bool odd = lane & 1;
    __nv_fp8_storage_t low_scale, high_scale;
    const float low = block_factor(largest(piece.low), scale, inverse_scale, low_scale);
    const float high = block_factor(largest(piece.high), scale, inverse_scale, high_scale);
    const uint2 run = exchange(fp4x8(piece.low, low), fp4x8(piece.high, high), odd);
    if (!live) return;
    *reinterpret_cast<uint2*>(line + (odd ? D / 4 : 0) + 8 * (lane / 2)) = run;
    block_scales[(odd ? D / 32 : 0) + lane / 2] = odd ? high_scale : low_scale;
}

// grid: x = rows S + K, y = thread blocks for the 2 * L * Hkv lines of a token, z = slots
template <typename T, int D, DflashKvQuant Q>
__global__ void __launch_bounds__(kThreads) kv_inject(const __grid_constant__ DflashKvInject p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 1000
    // No conversion to e2m1 before SM100; the software path is slow, and the launcher refuses it.
    if constexpr (Q == DFLASH_KV_NVFP4) return;
#endif
    constexpr int kLanes = D / 16;

    // The token: the same for the whole thread block, so these returns are uniform.
    const int slot = blockIdx.z, row = blockIdx.x;
    const int committed = p.committed[slot];
    if (committed < 0 || committed > p.context_rows) return;
    const bool in_context = row < committed;
    const int source = in_context ? row : row - committed;
    if (source >= (in_context ? p.context_rows : p.block_rows)) return;
    const int64_t position = int64_t(p.length[slot]) + row;
    if (position < 0 || position >= p.num_positions) return;
    if (!p.ring && position >= p.capacity) return;
    const int cache_row = p.ring ? int(position) % p.capacity : int(position);

    // The line. Threads past the last one repeat it and store nothing: shuffles need all lanes.
    const int lane = threadIdx.x % kLanes;
    const int wanted = blockIdx.y * (kThreads / kLanes) + threadIdx.x / kLanes;
    const int last = 2 * p.num_layers * p.num_kv_heads - 1;
    const bool live = wanted <= last;
    const unsigned index = live ? wanted : last;
    const int pair = index / unsigned(p.num_kv_heads);
    const int head = index % unsigned(p.num_kv_heads);
    const bool is_key = pair % 2 == 0;

    const T* from = static_cast<const T*>(in_context ? p.context[pair] : p.block[pair]);
    const int64_t stride = in_context ? p.context_stride : p.block_stride;
    const int64_t token = int64_t(slot) * (in_context ? p.context_rows : p.block_rows) + source;
    from += token * stride + int64_t(head) * D + 8 * lane;
    uint4 low = __ldcs(reinterpret_cast<const uint4*>(from));
    uint4 high = __ldcs(reinterpret_cast<const uint4*>(from + D / 2));
    const int64_t place = (int64_t(slot) * p.num_kv_heads + head) * p.capacity + cache_row;

    Piece piece;
    if (Q != DFLASH_KV_NONE || is_key) {
        unpack<T>(low, piece.low);
        unpack<T>(high, piece.high);
    }
    if (is_key) {
        const float* weight = p.k_norm[pair / 2];
        const unsigned lanes = ((1u << kLanes) - 1) << (threadIdx.x % 32 / kLanes * kLanes);
        if (weight) rms_norm<D>(piece, weight, p.eps, lane, lanes);
        const int64_t angle = position * (D / 2) + 8 * lane;
        rotate(piece, p.cos + angle, p.sin + angle);
    }
    if constexpr (Q == DFLASH_KV_NONE) {
        if (is_key) {  // values are copied as they are, NaN payloads too
            low = pack<T>(piece.low);
            high = pack<T>(piece.high);
        }
        T* to = static_cast<T*>(p.cache[pair]) + place * D + 8 * lane;
        if (live) {
            *reinterpret_cast<uint4*>(to) = low;
            *reinterpret_cast<uint4*>(to + D / 2) = high;
        }
    } else if constexpr (Q == DFLASH_KV_FP8) {
        uint8_t* line = static_cast<uint8_t*>(p.cache[pair]) + place * D;
        store_fp8<D>(piece, __ldg(p.scale + pair), line, lane, live);
    } else {
        uint8_t* line = static_cast<uint8_t*>(p.cache[pair]) + place * (D / 2);
        uint8_t* scales = p.cache_scale[pair] + place * (D / 16);
        store_nvfp4<D>(piece, __ldg(p.scale + pair), line, scales, lane, live);
    }
}

}  // namespace dflash
