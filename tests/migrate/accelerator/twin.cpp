// The device "twin": memory of its own, streams, events and generators of its own, and the CPU's arithmetic.
// It stands for a real accelerator in tests: a tensor on it is no CPU tensor, and an operation that mixes the two is
// refused. Every operation copies its tensors to the host, runs the CPU's kernel and copies the results back, so that
// what a script computes on it equals what it computes on the CPU.

// Not ATen/ATen.h nor ATen/autocast_mode.h, which includes it: they would take half of the time to compile.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>

namespace at::autocast {
TORCH_API ScalarType get_autocast_dtype(c10::DeviceType device);
}

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using Mask = std::array<bool, 3>;

constexpr auto kTwin = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;

// ---- memory: every block is on record, with the device it belongs to ------------------------------------------------

constexpr DeviceIndex kPinned = -1;

struct Block {
  size_t bytes;
  DeviceIndex owner;
};

struct Memory {
  std::mutex lock;
  std::map<const void*, Block> blocks;
  std::array<int64_t, kDevices> used{};
  std::array<int64_t, kDevices> peak{};

  void* take(size_t bytes, DeviceIndex owner) {
    // The CPU's kernels want their vectors aligned, as torch's own allocator does.
    void* start = std::aligned_alloc(64, (std::max<size_t>(bytes, 1) + 63) / 64 * 64);
    TORCH_CHECK(start, "twin: ", bytes, " bytes are not to be had");
    std::lock_guard<std::mutex> held(lock);
    blocks[start] = {bytes, owner};
    if (owner != kPinned) {
      used[owner] += static_cast<int64_t>(bytes);
      peak[owner] = std::max(peak[owner], used[owner]);
    }
    return start;
  }

  void give(void* start) {
    std::lock_guard<std::mutex> held(lock);
    const auto found = blocks.find(start);
    if (found->second.owner != kPinned) used[found->second.owner] -= static_cast<int64_t>(found->second.bytes);
    blocks.erase(found);
    std::free(start);
  }

  // The owner of the block an address lies in, or nothing for ordinary host memory.
  std::optional<DeviceIndex> owner(const void* address) {
    std::lock_guard<std::mutex> held(lock);
    auto after = blocks.upper_bound(address);
    if (after == blocks.begin()) return std::nullopt;
    --after;
    const auto* start = static_cast<const char*>(after->first);
    const bool inside = static_cast<const char*>(address) < start + std::max<size_t>(after->second.bytes, 1);
    return inside ? std::optional<DeviceIndex>(after->second.owner) : std::nullopt;
  }
};

// Never destroyed: tensors may outlive what is static.
Memory& memory() {
  static auto* made = new Memory();
  return *made;
}

thread_local DeviceIndex current = 0;

void give_back(void* start) {
  if (start) memory().give(start);
}

struct Allocator final : c10::Allocator {
  explicit Allocator(bool pins) : pins(pins) {}
  bool pins;

  c10::DataPtr allocate(size_t bytes) override {
    void* start = bytes ? memory().take(bytes, pins ? kPinned : current) : nullptr;
    return {start, start, &give_back, pins ? Device(c10::kCPU) : Device(kTwin, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
};

Allocator device_memory(false);
Allocator pinned_memory(true);
REGISTER_ALLOCATOR(kTwin, &device_memory);

// ---- streams and events: all work is done when it is asked for, so an event is a moment --------------------------------

std::atomic<int64_t> streams_made{1};
thread_local std::array<c10::StreamId, kDevices> current_stream{};

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kTwin; }
  Device exchangeDevice(Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(kTwin, current); }
  void setDevice(Device device) const override {
    if (!device.has_index()) return;
    TORCH_CHECK(device.index() < kDevices, "twin: there is no device ", int(device.index()), " of ", int(kDevices));
    current = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }

  Stream getStream(Device device) const override { return make(device, current_stream[at(device)]); }
  Stream getDefaultStream(Device device) const override { return make(device, 0); }
  Stream getNewStream(Device device, int) const override { return make(device, streams_made++); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return make(device, streams_made++); }
  Stream exchangeStream(Stream stream) const override {
    const auto before = getStream(stream.device());
    current_stream[at(stream.device())] = stream.id();
    return before;
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(DeviceIndex) const override {}

  void record(void** event, const Stream&, DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new double;
    *static_cast<double*>(*event) = now_ms();
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<double*>(event); }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void* from, void* to, DeviceIndex) const override {
    return *static_cast<double*>(to) - *static_cast<double*>(from);
  }

 private:
  static DeviceIndex at(Device device) { return device.has_index() ? device.index() : current; }
  static Stream make(Device device, c10::StreamId id) {
    return Stream(Stream::UNSAFE, Device(kTwin, at(device)), id);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- random numbers: a CPU generator inside one that says it belongs to the device -------------------------------------

struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex index, at::Generator inside = at::detail::createCPUGenerator())
      : c10::GeneratorImpl{Device(kTwin, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)},
        inside(std::move(inside)) {}
  at::Generator inside;

  static c10::DeviceType device_type() { return kTwin; }
  void set_current_seed(uint64_t seed) override { inside.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inside.set_offset(offset); }
  uint64_t get_offset() const override { return inside.get_offset(); }
  uint64_t current_seed() const override { return inside.current_seed(); }
  uint64_t seed() override { return inside.seed(); }
  void set_state(const c10::TensorImpl& state) override { inside.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inside.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override { return new Generator(device().index(), inside.clone()); }
};

const at::Generator& default_generator(DeviceIndex index) {
  static auto* made = new std::array<at::Generator, kDevices>{
      at::make_generator<Generator>(DeviceIndex(0)), at::make_generator<Generator>(DeviceIndex(1))};
  return made->at(index < 0 ? current : index);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { Guard().setDevice(Device(kTwin, index)); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return Guard().exchangeDevice(Device(kTwin, index)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? current : exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current : index);
  }
  bool isPinnedPtr(const void* address) const override { return memory().owner(address) == kPinned; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto fresh = device_memory.allocate(bytes);
    if (bytes) std::memcpy(fresh.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(bytes);
  }
};
const int hooks_registered = (at::RegisterPrivateUse1HooksInterface(new Hooks()), 0);

// ---- operations that need no arithmetic --------------------------------------------------------------------------------

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<Device> device, std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "twin: only host memory can be pinned");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &device_memory, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &device_memory, keys, c10::dtype_or_default(dtype));
}

// A CPU tensor over the same bytes, for the copies below only; what claims to be on the device must lie there.
Tensor host_view(const Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;
  void* start = tensor.data_ptr();
  TORCH_CHECK(!tensor.numel() || memory().owner(start) == tensor.device().index(),
              "twin: a tensor of ", tensor.device(), " has memory that is not its own");
  auto view = at::from_blob(start, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  if (tensor.is_conj()) view._set_conj(true);
  return view;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  host_view(to).copy_(host_view(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

// Memory that is freed while a stream still works with it: here no stream does.
void record_stream(Tensor& tensor, Stream stream) {
  TORCH_CHECK(stream.device_type() == kTwin, "twin: ", tensor.device(), " has no stream of ", stream.device());
}

// ---- everything else: the CPU's kernels ----------------------------------------------------------------------------------

// CUDA reads these from the host too.
bool takes_host_tensors(const std::string& name) {
  static const std::array<const char*, 5> names{"aten::index", "aten::index_put", "aten::index_put_",
                                                 "aten::_index_put_impl_", "aten::_unsafe_index"};
  return std::find(names.begin(), names.end(), name) != names.end();
}

void refuse_host_tensor(const c10::OperatorHandle& op, const Tensor& tensor) {
  if (!tensor.defined() || tensor.is_privateuseone() || (tensor.dim() == 0 && tensor.is_cpu())) return;
  TORCH_CHECK(takes_host_tensors(op.schema().name()), "Expected all tensors to be on the same device, but ",
              op.schema().name(), " got one on twin and one on ", tensor.device());
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto wanted = torch::jit::last(*stack, schema.arguments().size());
  const auto first = stack->size() - schema.arguments().size();
  auto device = Device(kTwin, current);
  for (const auto& value : wanted) {
    if (value.isTensor() && value.toTensor().is_privateuseone()) device = value.toTensor().device();
    if (value.isTensor()) refuse_host_tensor(op, value.toTensor());
    if (value.isTensorList())
      for (const Tensor& tensor : value.toTensorVector()) refuse_host_tensor(op, tensor);
  }
  for (size_t at = 0; at < schema.arguments().size(); ++at) {
    const auto& argument = schema.arguments()[at];
    auto& value = (*stack)[first + at];
    const bool is_generator = argument.type()->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get()));
    if (!is_generator) continue;
    const auto given = value.isNone() ? default_generator(device.index()) : value.toGenerator();
    value = at::check_generator<Generator>(given)->inside;
  }
  const c10::DeviceGuard guard(device);
  at::native::cpu_fallback(op, stack);
}

std::optional<Tensor> host(const std::optional<Tensor>& tensor) {
  return tensor && tensor->defined() ? std::optional<Tensor>(tensor->cpu()) : std::nullopt;
}

// torch has kernels of these two that only raise; they come before the fallback.
Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                   c10::IntArrayRef output_padding, int64_t groups) {
  TORCH_CHECK(input.device() == weight.device(), "Expected all tensors to be on the same device, but convolution got ",
              input.device(), " and ", weight.device());
  return at::convolution(input.cpu(), weight.cpu(), host(bias), stride, padding, dilation, transposed, output_padding,
                         groups)
      .to(input.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, c10::IntArrayRef stride, c10::IntArrayRef padding,
    c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding, int64_t groups, Mask mask) {
  const std::array<int64_t, 1> bias_sizes{grad.size(1)};
  auto [to_input, to_weight, to_bias] =
      at::convolution_backward(grad.cpu(), input.cpu(), weight.cpu(), c10::IntArrayRef(bias_sizes), stride, padding,
                               dilation, transposed, output_padding, groups, mask);
  const auto back = [&](const Tensor& tensor) { return tensor.defined() ? tensor.to(input.device()) : tensor; };
  return {back(to_input), back(to_weight), back(to_bias)};
}

// Its schema does not say that it writes the running statistics, so the fallback would lose them.
std::tuple<Tensor, Tensor, Tensor> batch_norm(
    const Tensor& input, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& mean, const std::optional<Tensor>& var, bool training, double momentum, double eps) {
  for (const auto* other : {&weight, &bias, &mean, &var})
    TORCH_CHECK(!*other || !(*other)->defined() || (*other)->device() == input.device(),
                "Expected all tensors to be on the same device, but batch norm got ", input.device(), " and another");
  const auto host_mean = host(mean), host_var = host(var);
  auto [out, save_mean, save_var] =
      at::native_batch_norm(input.cpu(), host(weight), host(bias), host_mean, host_var, training, momentum, eps);
  if (training && host_mean) mean->copy_(*host_mean), var->copy_(*host_var);
  return {out.to(input.device()), save_mean.to(input.device()), save_var.to(input.device())};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", static_cast<const Tensor& (*)(const Tensor&, c10::IntArrayRef, std::optional<c10::MemoryFormat>)>(
                        at::native::resize_));
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("_copy_from", copy_from);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("native_batch_norm", batch_norm);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

// Autocast: what CUDA computes in 16 bits and in 32, of the operations that small networks are made of.
Tensor as_type(const Tensor& tensor, c10::ScalarType type) {
  const bool is_meant = tensor.defined() && tensor.is_privateuseone() && tensor.is_floating_point();
  return is_meant && tensor.scalar_type() != c10::kDouble ? tensor.to(type) : tensor;
}

template <bool in_32_bits>
void autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKey::AutocastPrivateUse1);
  const auto type = in_32_bits ? c10::kFloat : at::autocast::get_autocast_dtype(kTwin);
  for (size_t at = stack->size() - op.schema().arguments().size(); at < stack->size(); ++at)
    if ((*stack)[at].isTensor()) (*stack)[at] = as_type((*stack)[at].toTensor(), type);
  op.callBoxed(stack);
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const auto* name : {"addmm", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "linear", "matmul", "mm"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast<false>>());
  for (const auto* name : {"cross_entropy_loss", "exp", "layer_norm", "log", "log_softmax.int", "mse_loss", "nll_loss",
                           "pow.Tensor_Scalar", "softmax.int", "sum", "sum.dim_IntList"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast<true>>());
}

// ---- what the Python side asks ---------------------------------------------------------------------------------------------

int64_t devices() { return kDevices; }
int64_t memory_used(int64_t device) { return memory().used.at(device); }
int64_t memory_peak(int64_t device) { return memory().peak.at(device); }
void reset_peak(int64_t device) { memory().peak.at(device) = memory().used.at(device); }
at::Generator generator(int64_t device) { return default_generator(static_cast<DeviceIndex>(device)); }

TORCH_LIBRARY(twin, m) {
  m.def("devices() -> int", devices);
  m.def("memory_used(int device) -> int", memory_used);
  m.def("memory_peak(int device) -> int", memory_peak);
  m.def("reset_peak(int device) -> ()", reset_peak);
  m.def("generator(int device) -> Generator?", generator);
}

}  // namespace
