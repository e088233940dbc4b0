// Drives the plugin library as TensorRT does, without TensorRT: adapter_test PLUGIN [KERNEL].
//
// KERNEL is the kernel's CPU library; with it PLUGIN must be the CPU build too, and enqueue has to
// write what the kernel writes when it is called directly.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kv_inject_plugin.h"

using namespace nvinfer1;

#define CHECK(condition)                                                          \
    do {                                                                          \
        if (!(condition)) {                                                       \
            std::printf("%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                         \
        }                                                                         \
    } while (0)

namespace {

template <typename F>
F symbol(const char* library, const char* name) {
    void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!handle) std::printf("%s\n", dlerror());
    CHECK(handle);
    void* found = dlsym(handle, name);
    CHECK(found);
    return reinterpret_cast<F>(found);
}

struct Log final : ILogger {
    void log(Severity severity, char const* message) noexcept override {
        CHECK(severity == Severity::kERROR);
        last = message;
    }
    std::string last;
};

struct Finder final : ILoggerFinder {
    ILogger* findLogger() override { return &log; }
    Log log;
};

using Numbers = std::map<std::string, int32_t>;

IPluginV3* create(IPluginCreatorV3One& creator, const Numbers& numbers, const float* eps) {
    std::vector<PluginField> fields;
    for (const auto& [name, value] : numbers)
        fields.emplace_back(name.c_str(), &value, PluginFieldType::kINT32, 1);
    if (eps) fields.emplace_back("eps", eps, PluginFieldType::kFLOAT32, 1);
    const PluginFieldCollection collection{static_cast<int32_t>(fields.size()), fields.data()};
    return creator.createPlugin("test", &collection, TensorRTPhase::kBUILD);
}

struct Faces {
    explicit Faces(IPluginV3* plugin) : plugin(plugin) {
        CHECK(plugin);
        const auto face = [&](PluginCapabilityType type) {
            return plugin->getCapabilityInterface(type);
        };
        core = static_cast<IPluginV3OneCore*>(face(PluginCapabilityType::kCORE));
        build = static_cast<IPluginV3OneBuildV2*>(face(PluginCapabilityType::kBUILD));
        run = static_cast<IPluginV3OneRuntime*>(face(PluginCapabilityType::kRUNTIME));
        CHECK(core && build && run);
    }
    std::unique_ptr<IPluginV3> plugin;
    IPluginV3OneCore* core;
    IPluginV3OneBuildV2* build;
    IPluginV3OneRuntime* run;
};

Dims dims(std::initializer_list<int64_t> sizes) {
    Dims result{};
    for (const int64_t size : sizes) result.d[result.nbDims++] = size;
    return result;
}

// The tensors of a launch with L layers: types and shapes of the inputs, then of the outputs.
struct Tensors {
    std::vector<DynamicPluginTensorDesc> all;
    int32_t num_inputs = 0;

    void add(DataType type, std::initializer_list<int64_t> shape) {
        DynamicPluginTensorDesc d{};
        d.desc.type = type;
        d.desc.format = TensorFormat::kLINEAR;
        d.desc.dims = dims(shape);
        all.push_back(d);
    }
};

constexpr int64_t B = 2, S = 5, K = 3, Heads = 3, D = 64, C = 16, P = 20;

Tensors tensors(const Numbers& n, DataType act) {
    const auto value = [&](const char* name, int32_t otherwise) {
        const auto found = n.find(name);
        return found == n.end() ? otherwise : found->second;
    };
    const int32_t layers = value("num_layers", 0), quant = value("quant", 0);
    const bool bytes = value("bytes", 0);
    Tensors t;
    t.add(DataType::kINT32, {B});
    t.add(DataType::kINT32, {B});
    t.add(DataType::kFLOAT, {P, D / 2});
    t.add(DataType::kFLOAT, {P, D / 2});
    if (value("stacked", 0))
        t.add(act, {B, S, layers, 2, Heads, D});
    else
        for (int32_t i = 0; i < 2 * layers; ++i) t.add(act, {B, S, Heads * D});
    for (int32_t i = 0; value("block", 0) && i < 2 * layers; ++i) t.add(act, {B, K, Heads * D});
    for (int32_t i = 0; value("norm", 1) && i < layers; ++i) t.add(DataType::kFLOAT, {D});
    if (quant) t.add(DataType::kFLOAT, {2 * layers});
    const size_t first_cache = t.all.size();
    const DataType cache = quant == 0   ? act
                           : bytes      ? DataType::kINT8
                           : quant == 1 ? DataType::kFP8
                                        : DataType::kFP4;
    const int64_t row = quant == 2 && bytes ? D / 2 : D;
    for (int32_t i = 0; i < 2 * layers; ++i) t.add(cache, {B, Heads, C, row});
    for (int32_t i = 0; quant == 2 && i < 2 * layers; ++i)
        t.add(bytes ? DataType::kINT8 : DataType::kFP8, {B, Heads, C, D / 16});
    t.num_inputs = static_cast<int32_t>(t.all.size());
    for (int32_t i = static_cast<int32_t>(first_cache); i < t.num_inputs; ++i)
        t.all.push_back(t.all[i]);
    return t;
}

void check_build_time(IPluginCreatorV3One& creator, const Numbers& numbers, DataType act) {
    const float eps = 1e-6f;
    Faces f(create(creator, numbers, &eps));
    Tensors t = tensors(numbers, act);
    const int32_t num_outputs = static_cast<int32_t>(t.all.size()) - t.num_inputs;
    const int32_t first_cache = t.num_inputs - num_outputs;
    CHECK(f.build->getNbOutputs() == num_outputs);
    CHECK(f.build->configurePlugin(t.all.data(), t.num_inputs, nullptr, num_outputs) == 0);
    CHECK(f.build->configurePlugin(t.all.data(), t.num_inputs - 1, nullptr, num_outputs) != 0);

    std::vector<DataType> types, output_types(num_outputs);
    for (int32_t i = 0; i < t.num_inputs; ++i) types.push_back(t.all[i].desc.type);
    CHECK(f.build->getOutputDataTypes(output_types.data(), num_outputs, types.data(),
                                      t.num_inputs) == 0);
    CHECK(f.build->getOutputDataTypes(output_types.data(), 0, types.data(), t.num_inputs) != 0);
    for (int32_t i = 0; i < num_outputs; ++i) CHECK(output_types[i] == types[first_cache + i]);

    // Shapes are handed through, so any addresses will do for the expressions.
    std::vector<DimsExprs> shapes(t.num_inputs), output_shapes(num_outputs);
    for (int32_t i = 0; i < t.num_inputs; ++i) {
        shapes[i].nbDims = t.all[i].desc.dims.nbDims;
        for (int32_t j = 0; j < shapes[i].nbDims; ++j)
            shapes[i].d[j] = reinterpret_cast<IDimensionExpr const*>(0x1000 + 64 * i + 8 * j);
    }
    auto& builder = *reinterpret_cast<IExprBuilder*>(shapes.data());
    CHECK(f.build->getOutputShapes(shapes.data(), t.num_inputs, nullptr, 0, output_shapes.data(),
                                   num_outputs, builder) == 0);
    for (int32_t i = 0; i < num_outputs; ++i) {
        CHECK(output_shapes[i].nbDims == 4);
        CHECK(output_shapes[i].d[3] == shapes[first_cache + i].d[3]);
    }

    // Every tensor as declared is supported, in every other type or format it is not.
    for (int32_t i = 0; i < static_cast<int32_t>(t.all.size()); ++i) {
        const auto supported = [&] {
            return f.build->supportsFormatCombination(i, t.all.data(), t.num_inputs, num_outputs);
        };
        CHECK(supported());
        PluginTensorDesc& desc = t.all[i].desc;
        const PluginTensorDesc right = desc;
        desc.format = TensorFormat::kCHW2;
        CHECK(!supported());
        desc = right;
        for (int32_t type = 0; type <= static_cast<int32_t>(DataType::kFP4); ++type) {
            desc.type = static_cast<DataType>(type);
            const bool other_act =
                i == 4 && (desc.type == DataType::kBF16 || desc.type == DataType::kHALF);
            CHECK(supported() == (desc.type == right.type || other_act));
        }
        desc = right;
    }
    const bool aliased = numbers.count("aliased") && numbers.at("aliased");
    for (int32_t i = 0; i < num_outputs; ++i)
        CHECK(f.build->getAliasedInput(i) == (aliased ? first_cache + i : -1));
    CHECK(f.build->getFormatCombinationLimit() > 0);
    CHECK(f.build->getNbTactics() == 0);
    CHECK(f.build->getWorkspaceSize(nullptr, 0, nullptr, 0) == 0);
}

void check_identity(IPluginCreatorV3One& creator) {
    const float eps = 1e-6f;
    Faces f(create(creator, {{"num_layers", 5}, {"quant", 1}, {"ring", 1}, {"block", 1}}, &eps));
    for (const char* name : {f.core->getPluginName(), creator.getPluginName()})
        CHECK(std::string(name) == "DFlashKvInject");
    for (const char* version : {f.core->getPluginVersion(), creator.getPluginVersion()})
        CHECK(std::string(version) == "1");
    for (const char* space : {f.core->getPluginNamespace(), creator.getPluginNamespace()})
        CHECK(std::string(space) == "dflash");
    CHECK(std::string(f.plugin->getInterfaceInfo().kind) == "PLUGIN");
    CHECK(f.build->getInterfaceInfo().major == 2);

    // An engine stores the fields; a plugin made of them is the same one.
    PluginFieldCollection const* fields = f.run->getFieldsToSerialize();
    CHECK(fields->nbFields == creator.getFieldNames()->nbFields);
    Faces again(creator.createPlugin("again", fields, TensorRTPhase::kRUNTIME));
    std::unique_ptr<IPluginV3> clone(again.plugin->clone());
    std::unique_ptr<IPluginV3> attached(again.run->attachToContext(nullptr));
    for (IPluginV3* other : {again.plugin.get(), clone.get(), attached.get()}) {
        auto* run = static_cast<IPluginV3OneRuntime*>(
            other->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
        PluginFieldCollection const* theirs = run->getFieldsToSerialize();
        CHECK(theirs->nbFields == fields->nbFields);
        for (int32_t i = 0; i < fields->nbFields; ++i) {
            CHECK(!std::strcmp(theirs->fields[i].name, fields->fields[i].name));
            CHECK(!std::strcmp(creator.getFieldNames()->fields[i].name, fields->fields[i].name));
            CHECK(theirs->fields[i].data != fields->fields[i].data);
            CHECK(!std::memcmp(theirs->fields[i].data, fields->fields[i].data, 4));
        }
    }
    CHECK(again.run->onShapeChange(nullptr, 0, nullptr, 0) == 0);
    CHECK(again.run->setTactic(0) == 0);
}

void check_refusals(IPluginCreatorV3One& creator, Log& log) {
    const float eps = 1e-6f, negative = -1.0f;
    const auto refused = [&](const Numbers& numbers, const float* e, const char* message) {
        log.last.clear();
        CHECK(!create(creator, numbers, e));
        CHECK(log.last.find(message) != std::string::npos);
    };
    refused({}, &eps, "num_layers must be given");
    refused({{"num_layers", 17}}, &eps, "1 to 16");
    refused({{"num_layers", 2}}, nullptr, "eps must be given");
    refused({{"num_layers", 2}}, &negative, "eps must be given");
    refused({{"num_layers", 2}, {"quant", 3}}, &eps, "quant must be 0, 1 or 2");
    refused({{"num_layers", 2}, {"block", 2}}, &eps, "are 0 or 1");
    refused({{"num_layers", 2}, {"layers", 2}}, &eps, "there is no attribute layers");
    refused({{"num_layers", 2}, {"eps", 1}}, &eps, "eps must be one float32");
    log.last.clear();
    CHECK(!creator.createPlugin("none", nullptr, TensorRTPhase::kBUILD));
    CHECK(log.last.find("there are no attributes") != std::string::npos);
}

int64_t bytes_of(const PluginTensorDesc& d) {
    int64_t elements = 1;
    for (int32_t i = 0; i < d.dims.nbDims; ++i) elements *= d.dims.d[i];
    switch (d.type) {
        case DataType::kFP4: return elements / 2;
        case DataType::kFLOAT:
        case DataType::kINT32: return 4 * elements;
        case DataType::kBF16:
        case DataType::kHALF: return 2 * elements;
        default: return elements;
    }
}

// 16-byte aligned bytes.
struct Buffer {
    explicit Buffer(int64_t bytes)
        : data(static_cast<uint8_t*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64))),
          bytes(bytes) {}
    Buffer(const Buffer& other) : Buffer(other.bytes) { std::memcpy(data, other.data, bytes); }
    ~Buffer() { std::free(data); }
    uint8_t* data;
    int64_t bytes;
};

void check_enqueue(IPluginCreatorV3One& creator, Log& log, const char* kernel,
                   const Numbers& numbers, bool in_place) {
    const auto launch_kernel =
        symbol<cudaError_t (*)(const DflashKvInject*, cudaStream_t)>(kernel, "dflash_kv_inject");
    const float eps = 1e-5f;
    Faces f(create(creator, numbers, &eps));
    const Tensors t = tensors(numbers, DataType::kBF16);
    const int32_t num_outputs = static_cast<int32_t>(t.all.size()) - t.num_inputs;
    const int32_t first_cache = t.num_inputs - num_outputs;
    std::vector<PluginTensorDesc> desc;
    for (const auto& d : t.all) desc.push_back(d.desc);

    std::vector<Buffer> memory;
    uint32_t seed = 1;
    for (int32_t i = 0; i < t.num_inputs; ++i) {
        memory.emplace_back(bytes_of(desc[i]));
        for (int64_t j = 0; j < memory[i].bytes; ++j) {
            seed = seed * 1664525u + 1013904223u;
            // 0x3f in every upper byte: floats and bfloat16 of moderate size
            memory[i].data[j] = i < first_cache && j % 2 ? 0x3f : seed >> 24;
        }
    }
    const int32_t length[B] = {0, 7}, committed[B] = {4, 1};
    std::memcpy(memory[0].data, length, sizeof length);
    std::memcpy(memory[1].data, committed, sizeof committed);
    std::vector<Buffer> expected = memory, fresh;
    for (int32_t i = first_cache; i < t.num_inputs; ++i) fresh.emplace_back(memory[i].bytes);

    std::vector<const void*> inputs;
    std::vector<void*> outputs;
    for (const Buffer& buffer : memory) inputs.push_back(buffer.data);
    for (int32_t i = 0; i < num_outputs; ++i)
        outputs.push_back(in_place ? memory[first_cache + i].data : fresh[i].data);
    log.last.clear();
    const int32_t status = f.run->enqueue(desc.data(), desc.data() + t.num_inputs, inputs.data(),
                                          outputs.data(), nullptr, nullptr);
    if (status) std::printf("%s\n", log.last.c_str());
    CHECK(status == 0);

    // The same, by hand.
    const auto value = [&](const char* name, int32_t otherwise) {
        const auto found = numbers.find(name);
        return found == numbers.end() ? otherwise : found->second;
    };
    const int32_t layers = value("num_layers", 0), pairs = 2 * layers;
    const int64_t width = Heads * D;
    DflashKvInject p{};
    p.slots = B, p.context_rows = S, p.block_rows = value("block", 0) ? K : 0;
    p.num_layers = layers, p.num_kv_heads = Heads, p.head_dim = D, p.capacity = C,
    p.num_positions = P;
    p.type = DFLASH_KV_BF16, p.quant = value("quant", 0), p.ring = value("ring", 0), p.eps = eps;
    p.context_stride = value("stacked", 0) ? pairs * width : width, p.block_stride = width;
    int32_t next = 0;
    const auto take = [&] { return expected[next++].data; };
    p.length = reinterpret_cast<int32_t*>(take()), p.committed = reinterpret_cast<int32_t*>(take());
    p.cos = reinterpret_cast<float*>(take()), p.sin = reinterpret_cast<float*>(take());
    if (value("stacked", 0)) {
        uint8_t* first = take();
        for (int32_t i = 0; i < pairs; ++i) p.context[i] = first + 2 * width * i;
    } else {
        for (int32_t i = 0; i < pairs; ++i) p.context[i] = take();
    }
    for (int32_t i = 0; p.block_rows && i < pairs; ++i) p.block[i] = take();
    for (int32_t i = 0; value("norm", 1) && i < layers; ++i)
        p.k_norm[i] = reinterpret_cast<float*>(take());
    if (p.quant) p.scale = reinterpret_cast<float*>(take());
    for (int32_t i = 0; i < pairs; ++i) p.cache[i] = take();
    for (int32_t i = 0; p.quant == DFLASH_KV_NVFP4 && i < pairs; ++i) p.cache_scale[i] = take();
    CHECK(next == t.num_inputs);
    CHECK(launch_kernel(&p, nullptr) == cudaSuccess);
    int64_t written = 0;
    for (int32_t i = 0; i < num_outputs; ++i) {
        const Buffer& right = expected[first_cache + i];
        CHECK(!std::memcmp(outputs[i], right.data, right.bytes));
        if (!in_place) {
            for (int64_t j = 0; j < right.bytes; ++j)
                written += memory[first_cache + i].data[j] != right.data[j];
        }
    }
    if (!in_place) CHECK(written > 0);  // and the inputs are as they were
    for (int32_t i = 0; i < first_cache; ++i)
        CHECK(!std::memcmp(memory[i].data, expected[i].data, memory[i].bytes));

    // A projection of another width is refused, with a reason.
    desc[4].dims.d[desc[4].dims.nbDims - 1] -= 8;
    CHECK(f.run->enqueue(desc.data(), desc.data() + t.num_inputs, inputs.data(), outputs.data(),
                         nullptr, nullptr) != 0);
    CHECK(log.last.find("width") != std::string::npos);
}

}  // namespace

int main(int argc, char** argv) {
    CHECK(argc == 2 || argc == 3);
    Finder finder;
    symbol<void (*)(ILoggerFinder*)>(argv[1], "setLoggerFinder")(&finder);
    int32_t count = 0;
    auto* list =
        symbol<IPluginCreatorInterface* const* (*)(int32_t&)>(argv[1], "getCreators")(count);
    CHECK(count == 1);
    CHECK(std::string(list[0]->getInterfaceInfo().kind) == "PLUGIN CREATOR_V3ONE");
    auto& creator = *static_cast<IPluginCreatorV3One*>(list[0]);
    check_identity(creator);
    check_refusals(creator, finder.log);
    const std::vector<Numbers> kinds = {
        {{"num_layers", 5}, {"stacked", 1}},
        {{"num_layers", 1}, {"block", 1}},
        {{"num_layers", 1}, {"block", 1}, {"norm", 0}, {"aliased", 1}},
        {{"num_layers", 3}, {"stacked", 1}, {"quant", 1}, {"ring", 1}},
        {{"num_layers", 2}, {"block", 1}, {"quant", 2}},
        {{"num_layers", 2}, {"block", 1}, {"quant", 1}, {"bytes", 1}},
        {{"num_layers", 2}, {"stacked", 1}, {"quant", 2}, {"bytes", 1}, {"aliased", 1}},
    };
    for (const Numbers& numbers : kinds) {
        for (const DataType act : {DataType::kBF16, DataType::kHALF})
            check_build_time(creator, numbers, act);
        for (const bool in_place : {true, false})
            if (argc == 3) check_enqueue(creator, finder.log, argv[2], numbers, in_place);
    }
    std::printf("adapter: %zu kinds of launches, %s\n", kinds.size(),
                argc == 3 ? "enqueue too" : "without enqueue");
    return 0;
}
