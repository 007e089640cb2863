// The runtime of the simulated device, see runtime.h.
#include "runtime.h"

#include <c10/util/Exception.h>

#include <cstring>
#include <thread>

#include "versions.h"

namespace zerolap_sim {

using std::chrono::steady_clock;

// ---- marks -----------------------------------------------------------------------------------------------------------

void Mark::set() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    set_ = true;
    time_ = steady_clock::now();
  }
  changed_.notify_all();
}

void Mark::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return set_; });
}

bool Mark::wait_until(steady_clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_until(lock, deadline, [this] { return set_; });
}

bool Mark::is_set() {
  std::lock_guard<std::mutex> lock(mutex_);
  return set_;
}

steady_clock::time_point Mark::time() {
  std::lock_guard<std::mutex> lock(mutex_);
  return time_;
}

// ---- the calling thread ----------------------------------------------------------------------------------------------

static thread_local int this_device = 0;
static thread_local std::map<int, int64_t> this_streams;

int current_device() { return this_device; }
int exchange_device(int device) {
  TORCH_CHECK(device >= 0 && device < Runtime::get().num_devices(), "simulated device: there is no device ", device,
              "; ", Runtime::get().num_devices(), " are configured (zerolap_sim.configure(num_devices=...))");
  return std::exchange(this_device, device);
}
int64_t current_stream_id(int device) {
  auto found = this_streams.find(device);
  return found == this_streams.end() ? 0 : found->second;
}
int64_t exchange_stream(int device, int64_t id) {
  const int64_t before = current_stream_id(device);
  this_streams[device] = id;
  return before;
}

// ---- settings --------------------------------------------------------------------------------------------------------

Runtime& Runtime::get() {
  static Runtime* runtime = new Runtime();  // leaked: workers outlive static destructors
  return *runtime;
}

Settings Runtime::settings() {
  std::lock_guard<std::mutex> lock(mutex_);
  return settings_;
}

void Runtime::configure(const Settings& settings) {
  std::lock_guard<std::mutex> lock(mutex_);
  const bool reseed = settings.seed != settings_.seed || settings.delay_us != settings_.delay_us ||
                      settings.delay_probability != settings_.delay_probability;
  settings_ = settings;
  stacks_ = settings.stacks;
  execute_ = settings.execute;
  synchronous_ = settings.synchronous;
  if (!reseed) return;
  for (auto& [device, stream] : default_streams_) stream->delays_.seed(settings.seed + 7919 * stream->label.slot);
  for (auto& stream : streams_) stream->delays_.seed(settings.seed + 7919 * stream->label.slot);
}

void Runtime::enable_checker(bool on) {
  std::lock_guard<std::mutex> lock(mutex_);
  checker_.enable(on);
}

bool Runtime::checker_enabled() {
  std::lock_guard<std::mutex> lock(mutex_);
  return checker_.enabled();
}

void Runtime::set_num_devices(int count) {
  TORCH_CHECK_VALUE(count >= 1 && count <= 64, "simulated device: num_devices must be 1 to 64, got ", count);
  TORCH_CHECK(count == num_devices_ || num_launches_ == 0,
              "simulated device: num_devices cannot change after the first use (autograd has made a thread per device)");
  num_devices_ = count;
}

// ---- streams ---------------------------------------------------------------------------------------------------------

Stream& Runtime::add_stream(int device, int64_t id, const std::string& name) {
  const std::string suffix = device == 0 ? "" : " of device " + std::to_string(device);
  const std::string plain = id == 0 ? "default stream" : "stream " + std::to_string(id);
  auto stream = std::make_unique<Stream>(StreamLabel{num_slots_++, id, device, (name.empty() ? plain : name) + suffix});
  stream->delays_.seed(settings_.seed + 7919 * stream->label.slot);
  Stream& result = *stream;
  if (id == 0) {
    default_streams_[device] = std::move(stream);
  } else {
    streams_.push_back(std::move(stream));
  }
  return result;
}

Stream& Runtime::stream(int device, int64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(device >= 0 && device < num_devices_, "simulated device: there is no device ", device);
  if (id == 0) {
    auto found = default_streams_.find(device);
    return found != default_streams_.end() ? *found->second : add_stream(device, 0, "");
  }
  TORCH_CHECK(id > 0 && id <= static_cast<int64_t>(streams_.size()), "simulated device: there is no stream ", id);
  Stream& result = *streams_[id - 1];
  TORCH_CHECK(result.label.device == device, "simulated device: stream ", id, " belongs to device ",
              result.label.device, ", not to device ", device);
  return result;
}

Stream& Runtime::new_stream(int device, const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(streams_.size() < kMaxStreams, "simulated device: ", kMaxStreams,
              " streams were made; torch never destroys a stream, so make each once and keep it");
  return add_stream(device, static_cast<int64_t>(streams_.size()) + 1, name);
}

Stream& Runtime::pool_stream(int device) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& pool = pools_[device];
  const size_t next = next_in_pool_[device]++ % kPoolSize;
  if (next < pool.size()) return *pool[next];
  pool.push_back(&add_stream(device, static_cast<int64_t>(streams_.size()) + 1, ""));
  return *pool.back();
}

std::vector<Stream*> Runtime::streams_of(int device) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Stream*> result;
  auto found = default_streams_.find(device);
  if (found != default_streams_.end()) result.push_back(found->second.get());
  for (auto& stream : streams_)
    if (stream->label.device == device) result.push_back(stream.get());
  return result;
}

// ---- queues ----------------------------------------------------------------------------------------------------------

void Runtime::enqueue(Stream& stream, Task task) {
  std::lock_guard<std::mutex> lock(stream.mutex_);
  stream.queue_.push_back(std::move(task));
  if (stream.is_busy_) return;  // its worker looks for more before it leaves
  stream.is_busy_ = true;
  assign_worker(stream);
}

void Runtime::assign_worker(Stream& stream) {
  std::lock_guard<std::mutex> lock(workers_mutex_);
  if (free_workers_.empty()) {
    std::thread(&Runtime::work, this, &stream).detach();
    return;
  }
  Worker* worker = free_workers_.back();
  free_workers_.pop_back();
  worker->stream = &stream;
  worker->changed.notify_one();
}

// Never returns: a thread that ended while the process exits could meet destroyed statics.
void Runtime::work(Stream* stream) {
  if (on_worker_start) on_worker_start();
  Worker self;
  for (;;) {
    run_queue(*stream);
    std::unique_lock<std::mutex> lock(workers_mutex_);
    self.stream = nullptr;
    free_workers_.push_back(&self);
    self.changed.wait(lock, [&] { return self.stream != nullptr; });
    stream = self.stream;
  }
}

void Runtime::run_queue(Stream& stream) {
  for (;;) {
    Task task;
    {
      std::lock_guard<std::mutex> lock(stream.mutex_);
      if (stream.queue_.empty()) {
        stream.is_busy_ = false;
        return;
      }
      task = std::move(stream.queue_.front());
      stream.queue_.pop_front();
    }
    if (task.is_kernel && (failed_ || !execute_)) continue;
    if (task.delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(task.delay_us));
    try {
      task.run();
    } catch (const c10::Error& error) {
      fail(error.what_without_backtrace());
    } catch (const std::exception& error) {
      fail(error.what());
    }
    // The task is destroyed here, before the next one runs: a mark that follows says that its memory is let go, too.
  }
}

bool Runtime::is_idle(Stream& stream) {
  std::lock_guard<std::mutex> lock(stream.mutex_);
  return !stream.is_busy_;
}

static void poison(const BlockPtr& block) { std::memset(block->data, 0xFF, block->size); }  // NaN, or -1 for integers

void Runtime::launch(Stream& stream, const std::string& op, const std::vector<Operand>& operands,
                     std::function<void()> kernel) {
  raise_if_failed();
  ++num_launches_;
  const std::string stack = stacks_ && python_stack ? python_stack() : "";
  {
    std::lock_guard<std::mutex> lock(mutex_);
    checker_.launched(stream.label, op, stack, operands);
    for (const auto& operand : operands) {
      if (operand.block->takes_over.empty()) continue;
      auto old = std::exchange(operand.block->takes_over, {});
      enqueue(stream, {[old = std::move(old)] {
                         for (const auto& block : old) poison(block);
                       },
                       true, 0});
    }
    int64_t delay = 0;
    if (settings_.delay_us > 0 && std::uniform_real_distribution<>(0, 1)(stream.delays_) < settings_.delay_probability)
      delay = std::uniform_int_distribution<int64_t>(1, settings_.delay_us)(stream.delays_);
    enqueue(stream, {std::move(kernel), true, delay});
  }
  if (synchronous_) {
    // The program did not ask for this wait, so no clock learns of it: a missing wait is reported here as well.
    block_host(record(stream));
    raise_if_failed();
  }
}

MarkPtr Runtime::record(Stream& stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto mark = std::make_shared<Mark>(checker_.recorded(stream.label.slot));
  if (is_idle(stream)) {
    mark->set();  // or else a synchronisation would need a worker for every stream there has ever been
  } else {
    enqueue(stream, {[mark] { mark->set(); }});
  }
  return mark;
}

void Runtime::wait(Stream& stream, const MarkPtr& mark) {
  std::lock_guard<std::mutex> lock(mutex_);
  checker_.waits(stream.label.slot, mark->clock());
  enqueue(stream, {[mark] { mark->wait(); }});
}

void Runtime::hold_back(Stream& stream, const MarkPtr& mark) {
  std::lock_guard<std::mutex> lock(mutex_);
  enqueue(stream, {[mark] { mark->wait(); }});
}

// ---- the host waits --------------------------------------------------------------------------------------------------

void Runtime::block_host(const MarkPtr& mark) {
  if (mark->is_set()) return;
  if (without_gil) {
    without_gil([&] { mark->wait(); });
  } else {
    mark->wait();
  }
}

void Runtime::synchronize(const MarkPtr& mark) {
  block_host(mark);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    checker_.host_learns(mark->clock());
  }
  raise_if_failed();
}

void Runtime::synchronize(Stream& stream) { synchronize(record(stream)); }

void Runtime::synchronize_device(int device) {
  std::vector<MarkPtr> marks;
  for (Stream* stream : streams_of(device)) marks.push_back(record(*stream));
  for (const auto& mark : marks) synchronize(mark);
  raise_if_failed();
}

void Runtime::drain(std::chrono::milliseconds limit) {
  const auto deadline = steady_clock::now() + limit;
  for (int device = 0; device < num_devices_; ++device)
    for (Stream* stream : streams_of(device))
      if (!record(*stream)->wait_until(deadline)) return;
}

bool Runtime::query(const MarkPtr& mark) {
  if (!mark->is_set()) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  checker_.host_learns(mark->clock());
  return true;
}

bool Runtime::query(Stream& stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!is_idle(stream)) return false;
  checker_.host_learns_stream(stream.label.slot);
  return true;
}

// ---- memory ----------------------------------------------------------------------------------------------------------

static BlockPtr make_block(size_t size) {
  auto block = std::make_shared<Block>();
  block->size = size;
  if (posix_memalign(&block->data, 64, size ? size : 64) != 0) {
    block->data = nullptr;
    throw std::bad_alloc();
  }
  return block;
}

BlockPtr Runtime::allocate(size_t size, Stream& home) {
  auto block = make_block(size);
  poison(block);
  block->device = home.label.device;
  block->home = home.label.slot;
  std::lock_guard<std::mutex> lock(mutex_);
  block->number = ++num_blocks_;
  bytes_[block->device] += static_cast<int64_t>(size);
  peak_bytes_[block->device] = std::max(peak_bytes_[block->device], bytes_[block->device]);
  checker_.allocated(*block);
  // A caching allocator would hand out freed memory here. We always take fresh memory and spoil the freed one when
  // the new tenant is first used: what a kernel still in flight sees is the same, and no address is ever ambiguous.
  block->takes_over = std::exchange(home.reusable_, {});
  return block;
}

BlockPtr Runtime::allocate_pinned(size_t size) {
  auto block = make_block(size);
  block->is_pinned = true;
  std::lock_guard<std::mutex> lock(mutex_);
  block->number = ++num_blocks_;
  return block;
}

// The tenant is gone. Kernels in the queues still hold the block itself.
void Runtime::release(const BlockPtr& block) {
  if (block->is_pinned) return;
  std::lock_guard<std::mutex> lock(mutex_);
  bytes_[block->device] -= static_cast<int64_t>(block->size);
  checker_.freed(block);
  Stream* home = nullptr;
  std::vector<Stream*> users;
  auto visit = [&](Stream& stream) {
    if (stream.label.slot == block->home) home = &stream;
    if (block->used_by.count(stream.label.slot)) users.push_back(&stream);
  };
  for (auto& [device, stream] : default_streams_) visit(*stream);
  for (auto& stream : streams_) visit(*stream);
  block->takes_over.clear();  // never used, so nothing was overwritten; kept, they would pile up
  if (users.empty()) {
    home->reusable_.push_back(block);
    return;
  }
  // record_stream: the block becomes reusable when the streams it was used on have got past this point.
  auto left = std::make_shared<std::atomic<size_t>>(users.size());
  for (Stream* user : users)
    enqueue(*user, {[this, block, left, home] {
      if (--*left != 0) return;
      std::lock_guard<std::mutex> inner(mutex_);
      home->reusable_.push_back(block);
    }});
}

void Runtime::record_use(const BlockPtr& block, const Stream& stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (stream.label.slot != block->home) block->used_by.insert(stream.label.slot);
}

void Runtime::touch_on_host(const std::string& op, const std::vector<Operand>& operands) {
  const std::string stack = stacks_ && python_stack ? python_stack() : "";
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& operand : operands) checker_.host_touches(op, stack, operand);
}

int64_t Runtime::bytes_in_use(int device) {
  std::lock_guard<std::mutex> lock(mutex_);
  return bytes_[device];
}
int64_t Runtime::peak_bytes(int device) {
  std::lock_guard<std::mutex> lock(mutex_);
  return peak_bytes_[device];
}
void Runtime::reset_peak(int device) {
  std::lock_guard<std::mutex> lock(mutex_);
  peak_bytes_[device] = bytes_[device];
}

// ---- hand-overs, failures, reports -----------------------------------------------------------------------------------

Clock Runtime::publish() {
  std::lock_guard<std::mutex> lock(mutex_);
  return checker_.host_publishes();
}
void Runtime::receive(const Clock& clock) {
  std::lock_guard<std::mutex> lock(mutex_);
  checker_.host_receives(clock);
}

void Runtime::fail(const std::string& message) {
  std::lock_guard<std::mutex> lock(failure_mutex_);
  if (failed_) return;  // the first failure is the cause, the rest are its consequences
  failure_ = message;
  failed_ = true;
}

void Runtime::raise_if_failed() {
  if (!failed_) return;
  std::lock_guard<std::mutex> lock(failure_mutex_);
  raise_device_error({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, "simulated device: " + failure_ +
      "\nThe simulated device of this process has failed and runs nothing more; every launch and synchronisation raises "
      "this first error.");
}

std::vector<ReportRecord> Runtime::take_reports() {
  std::lock_guard<std::mutex> lock(mutex_);
  return checker_.take_reports();
}

}  // namespace zerolap_sim
