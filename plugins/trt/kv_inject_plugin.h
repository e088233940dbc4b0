// The KV-injection kernel as a TensorRT plugin (IPluginV3): DFlashKvInject, version 1, namespace
// dflash.
//
// Inputs                                                        present
//   length, committed     int32 [B]                              always
//   cos, sin              float32 [P, D/2]                       always
//   context               ACT [B, S, L*2*Hkv*D], any split of the last axis: stacked = 1
//   context k0, v0, k1 .. ACT [B, S, Hkv*D] each                 stacked = 0
//   block k0, v0, k1 ..   ACT [B, K, Hkv*D] each                 block = 1
//   k_norm 0, 1, ..       float32 [D] each                       norm = 1
//   scale                 float32 [2L]                           quant > 0
//   cache k0, v0, k1 ..   [B, Hkv, C, D]                         always
//   cache_scale k0, v0 .. [B, Hkv, C, D/16]                      quant = 2
// Outputs: the caches, then the cache scales, as the inputs of these names.
//
// ACT is BF16 or FP16. A cache holds ACT, FP8 (quant = 1) or FP4 (quant = 2), scales are FP8. With
// bytes = 1 quantized caches and scales are INT8 tensors of the same bytes (FP4: D/2 in a row).
//
// The run time binds an output to the memory of its input; then nothing is copied. If an output has
// memory of its own, the cache is copied there first. aliased = 1 declares the pairs to TensorRT,
// which may then insert copies itself: off unless asked.
#pragma once

#include <NvInferRuntime.h>

#include <vector>

#include "kv_inject.h"

namespace dflash {

constexpr char const* kPluginName = "DFlashKvInject";
constexpr char const* kPluginVersion = "1";
constexpr char const* kPluginNamespace = "dflash";

// The plugin's attributes; all are int32 but eps. num_layers and eps must be given.
struct Attributes {
    int32_t num_layers = 0;
    float eps = -1;
    int32_t quant = DFLASH_KV_NONE;
    int32_t stacked = 0;
    int32_t block = 0;
    int32_t norm = 1;
    int32_t ring = 0;
    int32_t bytes = 0;
    int32_t aliased = 0;
};

// Where each group of inputs starts.
struct Inputs {
    explicit Inputs(const Attributes& attributes);

    static constexpr int32_t length = 0, committed = 1, cos = 2, sin = 3, context = 4;
    int32_t block, k_norm, scale, cache, cache_scale, count;
};

class KvInjectPlugin final : public nvinfer1::IPluginV3,
                             public nvinfer1::IPluginV3OneCore,
                             public nvinfer1::IPluginV3OneBuildV2,
                             public nvinfer1::IPluginV3OneRuntime {
  public:
    explicit KvInjectPlugin(const Attributes& attributes);
    KvInjectPlugin(const KvInjectPlugin& other) : KvInjectPlugin(other.attributes_) {}

    nvinfer1::IPluginCapability* getCapabilityInterface(
        nvinfer1::PluginCapabilityType type) noexcept override;
    nvinfer1::IPluginV3* clone() noexcept override;

    char const* getPluginName() const noexcept override { return kPluginName; }
    char const* getPluginVersion() const noexcept override { return kPluginVersion; }
    char const* getPluginNamespace() const noexcept override { return kPluginNamespace; }

    int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* in, int32_t num_inputs,
                            nvinfer1::DynamicPluginTensorDesc const* out,
                            int32_t num_outputs) noexcept override;
    int32_t getOutputDataTypes(nvinfer1::DataType* output_types, int32_t num_outputs,
                               nvinfer1::DataType const* input_types,
                               int32_t num_inputs) const noexcept override;
    int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t num_inputs,
                            nvinfer1::DimsExprs const* shape_inputs, int32_t num_shape_inputs,
                            nvinfer1::DimsExprs* outputs, int32_t num_outputs,
                            nvinfer1::IExprBuilder& builder) noexcept override;
    bool supportsFormatCombination(int32_t position,
                                   nvinfer1::DynamicPluginTensorDesc const* tensors,
                                   int32_t num_inputs, int32_t num_outputs) noexcept override;
    int32_t getNbOutputs() const noexcept override;
    int32_t getAliasedInput(int32_t output) noexcept override;

    int32_t onShapeChange(nvinfer1::PluginTensorDesc const* in, int32_t num_inputs,
                          nvinfer1::PluginTensorDesc const* out,
                          int32_t num_outputs) noexcept override;
    int32_t enqueue(nvinfer1::PluginTensorDesc const* input_desc,
                    nvinfer1::PluginTensorDesc const* output_desc, void const* const* inputs,
                    void* const* outputs, void* workspace, cudaStream_t stream) noexcept override;
    nvinfer1::IPluginV3* attachToContext(
        nvinfer1::IPluginResourceContext* context) noexcept override;
    nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override;

  private:
    Attributes attributes_;
    Inputs at_;
    std::vector<nvinfer1::PluginField> fields_;  // they point into attributes_
    nvinfer1::PluginFieldCollection collection_{};
};

class KvInjectCreator final : public nvinfer1::IPluginCreatorV3One {
  public:
    KvInjectCreator();
    char const* getPluginName() const noexcept override { return kPluginName; }
    char const* getPluginVersion() const noexcept override { return kPluginVersion; }
    char const* getPluginNamespace() const noexcept override { return kPluginNamespace; }
    nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override {
        return &collection_;
    }
    nvinfer1::IPluginV3* createPlugin(char const* name,
                                      nvinfer1::PluginFieldCollection const* fields,
                                      nvinfer1::TensorRTPhase phase) noexcept override;

  private:
    std::vector<nvinfer1::PluginField> fields_;
    nvinfer1::PluginFieldCollection collection_{};
};

}  // namespace dflash
