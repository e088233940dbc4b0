// The adapter between TensorRT's plugin interface and the kernel's C interface. It uses no symbol
// of libnvinfer: TensorRT finds the creator through getCreators.
#include "kv_inject_plugin.h"

#include <cstring>
#include <exception>
#include <new>
#include <string>

namespace dflash {
namespace {

using namespace nvinfer1;

ILoggerFinder* g_logger_finder = nullptr;

void log_error(const std::string& message) noexcept {
    ILogger* logger = g_logger_finder ? g_logger_finder->findLogger() : nullptr;
    if (logger)
        logger->log(ILogger::Severity::kERROR, (std::string(kPluginName) + ": " + message).c_str());
}

// The fields of the attributes: name, address, type. One table for creating and serializing.
std::vector<PluginField> fields_of(const Attributes& a) {
    const auto number = [](char const* name, const int32_t& value) {
        return PluginField(name, &value, PluginFieldType::kINT32, 1);
    };
    return {number("num_layers", a.num_layers),
            PluginField("eps", &a.eps, PluginFieldType::kFLOAT32, 1),
            number("quant", a.quant),
            number("stacked", a.stacked),
            number("block", a.block),
            number("norm", a.norm),
            number("ring", a.ring),
            number("bytes", a.bytes),
            number("aliased", a.aliased)};
}

// Copies the given fields into `a`. What is wrong, or nothing.
std::string read_fields(const PluginFieldCollection& given, Attributes& a) {
    const std::vector<PluginField> known = fields_of(a);
    for (int32_t i = 0; i < given.nbFields; ++i) {
        const PluginField& field = given.fields[i];
        const std::string name = field.name ? field.name : "";
        const PluginField* match = nullptr;
        for (const PluginField& candidate : known)
            if (name == candidate.name) match = &candidate;
        if (!match) return "there is no attribute " + name;
        if (field.type != match->type || field.length != 1 || !field.data)
            return name + " must be one " +
                   (match->type == PluginFieldType::kFLOAT32 ? "float32" : "int32");
        std::memcpy(const_cast<void*>(match->data), field.data, 4);
    }
    if (a.num_layers < 1 || a.num_layers > DFLASH_KV_MAX_LAYERS)
        return "num_layers must be given, 1 to " + std::to_string(DFLASH_KV_MAX_LAYERS);
    if (!(a.eps >= 0)) return "eps must be given, 0 or more";
    if (a.quant < DFLASH_KV_NONE || a.quant > DFLASH_KV_NVFP4) return "quant must be 0, 1 or 2";
    for (const int32_t flag : {a.stacked, a.block, a.norm, a.ring, a.bytes, a.aliased})
        if (flag != 0 && flag != 1)
            return "stacked, block, norm, ring, bytes and aliased are 0 or 1";
    return "";
}

int64_t volume(const Dims& dims, int32_t from) {
    int64_t product = 1;
    for (int32_t i = from; i < dims.nbDims; ++i) product *= dims.d[i];
    return product;
}

int64_t bytes_of(const PluginTensorDesc& desc) {
    const int64_t elements = volume(desc.dims, 0);
    if (desc.type == DataType::kFP4) return elements / 2;
    return desc.type == DataType::kBF16 || desc.type == DataType::kHALF ? 2 * elements : elements;
}

cudaError_t copy(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
#ifdef DFLASH_ON_HOST
    (void)stream;
    std::memcpy(to, from, static_cast<size_t>(bytes));
    return cudaSuccess;
#else
    return cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream);
#endif
}

}  // namespace

Inputs::Inputs(const Attributes& a) {
    block = context + (a.stacked ? 1 : 2 * a.num_layers);
    k_norm = block + (a.block ? 2 * a.num_layers : 0);
    scale = k_norm + (a.norm ? a.num_layers : 0);
    cache = scale + (a.quant != DFLASH_KV_NONE ? 1 : 0);
    cache_scale = cache + 2 * a.num_layers;
    count = cache_scale + (a.quant == DFLASH_KV_NVFP4 ? 2 * a.num_layers : 0);
}

KvInjectPlugin::KvInjectPlugin(const Attributes& attributes)
    : attributes_(attributes), at_(attributes), fields_(fields_of(attributes_)) {
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
}

IPluginCapability* KvInjectPlugin::getCapabilityInterface(PluginCapabilityType type) noexcept {
    switch (type) {
        case PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore*>(this);
        case PluginCapabilityType::kBUILD: return static_cast<IPluginV3OneBuildV2*>(this);
        case PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime*>(this);
    }
    return nullptr;
}

IPluginV3* KvInjectPlugin::clone() noexcept {
    return new (std::nothrow) KvInjectPlugin(*this);
}

int32_t KvInjectPlugin::getNbOutputs() const noexcept {
    return at_.count - at_.cache;
}

int32_t KvInjectPlugin::getAliasedInput(int32_t output) noexcept {
    return attributes_.aliased ? at_.cache + output : -1;
}

int32_t KvInjectPlugin::configurePlugin(DynamicPluginTensorDesc const*, int32_t num_inputs,
                                        DynamicPluginTensorDesc const*,
                                        int32_t num_outputs) noexcept {
    if (num_inputs == at_.count && num_outputs == getNbOutputs()) return 0;
    log_error("expected " + std::to_string(at_.count) + " inputs, got " +
              std::to_string(num_inputs));
    return 1;
}

int32_t KvInjectPlugin::getOutputDataTypes(DataType* output_types, int32_t num_outputs,
                                           DataType const* input_types,
                                           int32_t num_inputs) const noexcept {
    if (num_inputs != at_.count || num_outputs != getNbOutputs()) return 1;
    for (int32_t i = 0; i < num_outputs; ++i) output_types[i] = input_types[at_.cache + i];
    return 0;
}

int32_t KvInjectPlugin::getOutputShapes(DimsExprs const* inputs, int32_t num_inputs,
                                        DimsExprs const*, int32_t, DimsExprs* outputs,
                                        int32_t num_outputs, IExprBuilder&) noexcept {
    if (num_inputs != at_.count || num_outputs != getNbOutputs()) return 1;
    for (int32_t i = 0; i < num_outputs; ++i) outputs[i] = inputs[at_.cache + i];
    return 0;
}

bool KvInjectPlugin::supportsFormatCombination(int32_t position,
                                               DynamicPluginTensorDesc const* tensors,
                                               int32_t num_inputs, int32_t) noexcept {
    if (num_inputs != at_.count || tensors[position].desc.format != TensorFormat::kLINEAR)
        return false;
    const DataType type = tensors[position].desc.type;
    const int32_t input = position < num_inputs ? position : at_.cache + position - num_inputs;
    const DataType act = tensors[Inputs::context].desc.type;
    if (input == Inputs::length || input == Inputs::committed) return type == DataType::kINT32;
    if (input == Inputs::cos || input == Inputs::sin) return type == DataType::kFLOAT;
    if (input == Inputs::context) return type == DataType::kBF16 || type == DataType::kHALF;
    if (input < at_.k_norm) return type == act;
    if (input < at_.cache) return type == DataType::kFLOAT;
    if (attributes_.quant == DFLASH_KV_NONE) return type == act;
    if (attributes_.bytes) return type == DataType::kINT8;
    const bool is_fp4 = attributes_.quant == DFLASH_KV_NVFP4 && input < at_.cache_scale;
    return type == (is_fp4 ? DataType::kFP4 : DataType::kFP8);
}

int32_t KvInjectPlugin::onShapeChange(PluginTensorDesc const*, int32_t, PluginTensorDesc const*,
                                      int32_t) noexcept {
    return 0;  // enqueue reads all shapes: it has nothing to prepare
}

int32_t KvInjectPlugin::enqueue(PluginTensorDesc const* input_desc,
                                PluginTensorDesc const* output_desc, void const* const* inputs,
                                void* const* outputs, void*, cudaStream_t stream) noexcept {
    const Dims& context = input_desc[Inputs::context].dims;
    const Dims& cache = input_desc[at_.cache].dims;
    const Dims& cos = input_desc[Inputs::cos].dims;
    const int32_t pairs = 2 * attributes_.num_layers;
    const int64_t width = cache.d[1] * cos.d[1] * 2;  // Hkv * D
    const int64_t stride = volume(context, 2);
    if (stride != (attributes_.stacked ? pairs : 1) * width) {
        log_error("the projection's width does not fit the caches");
        return 1;
    }
    DflashKvInject launch{};
    launch.slots = static_cast<int32_t>(context.d[0]);
    launch.context_rows = static_cast<int32_t>(context.d[1]);
    launch.block_rows =
        attributes_.block ? static_cast<int32_t>(input_desc[at_.block].dims.d[1]) : 0;
    launch.num_layers = attributes_.num_layers;
    launch.num_kv_heads = static_cast<int32_t>(cache.d[1]);
    launch.head_dim = static_cast<int32_t>(2 * cos.d[1]);
    launch.capacity = static_cast<int32_t>(cache.d[2]);
    launch.num_positions = static_cast<int32_t>(cos.d[0]);
    launch.type =
        input_desc[Inputs::context].type == DataType::kBF16 ? DFLASH_KV_BF16 : DFLASH_KV_FP16;
    launch.quant = attributes_.quant;
    launch.ring = attributes_.ring;
    launch.eps = attributes_.eps;
    launch.context_stride = stride;
    launch.block_stride = width;
    launch.length = static_cast<const int32_t*>(inputs[Inputs::length]);
    launch.committed = static_cast<const int32_t*>(inputs[Inputs::committed]);
    launch.cos = static_cast<const float*>(inputs[Inputs::cos]);
    launch.sin = static_cast<const float*>(inputs[Inputs::sin]);
    if (launch.quant != DFLASH_KV_NONE) launch.scale = static_cast<const float*>(inputs[at_.scale]);
    for (int32_t layer = 0; attributes_.norm && layer < attributes_.num_layers; ++layer)
        launch.k_norm[layer] = static_cast<const float*>(inputs[at_.k_norm + layer]);
    for (int32_t pair = 0; pair < pairs; ++pair) {
        const auto* first = static_cast<const uint16_t*>(inputs[Inputs::context]);
        launch.context[pair] =
            attributes_.stacked ? first + pair * width : inputs[Inputs::context + pair];
        if (attributes_.block) launch.block[pair] = inputs[at_.block + pair];
        launch.cache[pair] = outputs[pair];
        if (launch.quant == DFLASH_KV_NVFP4)
            launch.cache_scale[pair] = static_cast<uint8_t*>(outputs[pairs + pair]);
    }
    for (int32_t i = 0; i < getNbOutputs(); ++i) {
        const void* from = inputs[at_.cache + i];
        if (from != outputs[i] &&
            copy(outputs[i], from, bytes_of(output_desc[i]), stream) != cudaSuccess)
            return 1;
    }
    if (const char* wrong = dflash_kv_inject_check(&launch)) {
        log_error(wrong);
        return 1;
    }
    const cudaError_t status = dflash_kv_inject(&launch, stream);
    if (status != cudaSuccess) log_error("launch failed with CUDA error " + std::to_string(status));
    return status == cudaSuccess ? 0 : 1;
}

IPluginV3* KvInjectPlugin::attachToContext(IPluginResourceContext*) noexcept {
    return clone();
}

PluginFieldCollection const* KvInjectPlugin::getFieldsToSerialize() noexcept {
    return &collection_;
}

KvInjectCreator::KvInjectCreator() {
    static const Attributes defaults;
    fields_ = fields_of(defaults);
    for (PluginField& field : fields_) field.data = nullptr;
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
}

IPluginV3* KvInjectCreator::createPlugin(char const*, PluginFieldCollection const* fields,
                                         TensorRTPhase) noexcept {
    try {
        Attributes attributes;
        const std::string wrong =
            fields ? read_fields(*fields, attributes) : std::string("there are no attributes");
        if (wrong.empty()) return new KvInjectPlugin(attributes);
        log_error(wrong);
    } catch (const std::exception& error) {
        log_error(error.what());
    }
    return nullptr;
}

}  // namespace dflash

// What TensorRT's plugin registry looks up in a library.
extern "C" DFLASH_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
    static dflash::KvInjectCreator creator;
    static nvinfer1::IPluginCreatorInterface* const list[] = {&creator};
    count = 1;
    return list;
}

extern "C" DFLASH_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
    dflash::g_logger_finder = finder;
}
