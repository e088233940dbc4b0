// C interface of the KV-injection kernel: what a launch needs, and who may call it with what.
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

#define DFLASH_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

enum { DFLASH_KV_MAX_LAYERS = 16 };  // the pointers below travel as kernel parameters: 4 KB at most

enum DflashKvType { DFLASH_KV_BF16 = 0, DFLASH_KV_FP16 = 1 };

// What a cache holds.
//   NONE   elements of the input's type                    cache [B, Hkv, C, D]
//   FP8    e4m3, value / scale, saturating                 cache [B, Hkv, C, D] bytes
//   NVFP4  e2m1, two to a byte, the lower index in the     cache [B, Hkv, C, D / 2] bytes
//          low nibble; an e4m3 scale for 16 elements       cache_scale [B, Hkv, C, D / 16] bytes
enum DflashKvQuant { DFLASH_KV_NONE = 0, DFLASH_KV_FP8 = 1, DFLASH_KV_NVFP4 = 2 };

// One launch. Pairs are numbered 2 * layer + (0: key, 1: value).
//
// Row r of slot b that is written is context row r while r < committed[b], then block row
// r - committed[b]. It sits at position length[b] + r, which is also its row of a linear cache and,
// modulo the capacity, of a ring. All other rows of the inputs are written nowhere.
struct DflashKvInject {
    int32_t slots;          // B
    int32_t context_rows;   // S
    int32_t block_rows;     // K, or 0: no block
    int32_t num_layers;     // L
    int32_t num_kv_heads;   // Hkv
    int32_t head_dim;       // D: 64, 128 or 256
    int32_t capacity;       // C
    int32_t num_positions;  // P: rows of cos and sin
    int32_t type;           // DflashKvType of context and block
    int32_t quant;          // DflashKvQuant of the caches
    int32_t ring;           // 1: a cache row is position modulo capacity (sliding windows)
    float eps;
    int64_t context_stride;  // elements between rows: L * 2 * Hkv * D in the stacked projection
    int64_t block_stride;

    const int32_t* length;     // [B]
    const int32_t* committed;  // [B], each in 0 .. S, else the slot is left alone
    const float* cos;          // [P, D / 2], half-split layout, times the attention factor
    const float* sin;
    const float* scale;  // [2 * L]: FP8's scale, or NVFP4's global scale; positive. NONE: unused

    const float* k_norm[DFLASH_KV_MAX_LAYERS];       // [D] each, or null: no norm
    const void* context[2 * DFLASH_KV_MAX_LAYERS];   // [B, S] rows of Hkv * D elements
    const void* block[2 * DFLASH_KV_MAX_LAYERS];     // [B, K] rows of Hkv * D elements
    void* cache[2 * DFLASH_KV_MAX_LAYERS];           // updated in place
    uint8_t* cache_scale[2 * DFLASH_KV_MAX_LAYERS];  // NVFP4 alone
};

// What is wrong with a launch, or null. Reads no device memory.
DFLASH_EXPORT const char* dflash_kv_inject_check(const struct DflashKvInject* launch);

// Enqueues one kernel. cudaErrorInvalidValue: see dflash_kv_inject_check.
// cudaErrorNotSupported: NVFP4 on a GPU older than SM100, which cannot convert to it.
DFLASH_EXPORT cudaError_t dflash_kv_inject(const struct DflashKvInject* launch,
                                           cudaStream_t stream);

#ifdef __cplusplus
}
#endif
