// The runtime of the simulated device: streams, events, memory and its failures. No torch tensors.
//
// A stream is a queue and, while there is something in it, one worker thread. Host threads enqueue; workers run one task
// after the other; an event is a task that sets a mark; a stream that waits runs a task that blocks on a mark. A worker
// whose queue is empty is free for any other stream: streams are never destroyed, so one thread for each would pile up.
// A kernel that throws makes the device
// *failed*: from then on workers drop kernels but still set marks, so nothing that waits can hang, and every launch and
// every host synchronisation raises the first failure again, as a sticky error on a card does.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "checker.h"

namespace zerolap_sim {

// One recording of an event: a later recording makes a new mark, and whoever waited for this one still waits for this.
class Mark {
 public:
  explicit Mark(Clock clock) : clock_(std::move(clock)) {}
  void set();
  void wait();
  bool wait_until(std::chrono::steady_clock::time_point deadline);
  bool is_set();
  std::chrono::steady_clock::time_point time();
  const Clock& clock() const { return clock_; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
  std::chrono::steady_clock::time_point time_;
  const Clock clock_;
};
using MarkPtr = std::shared_ptr<Mark>;

struct Task {
  std::function<void()> run;
  bool is_kernel = false;  // dropped when the device has failed, or when nothing is to be executed
  int64_t delay_us = 0;
};

class Stream {
 public:
  explicit Stream(StreamLabel label) : label(std::move(label)) {}
  const StreamLabel label;

 private:
  friend class Runtime;
  std::mutex mutex_;
  std::deque<Task> queue_;
  bool is_busy_ = false;  // has a worker: something is queued or running
  std::vector<BlockPtr> reusable_;  // freed blocks that the next allocation on this stream may be handed
  std::mt19937_64 delays_;          // drawn at enqueue: the sequence per stream does not depend on timing
};

// A thread that runs the tasks of one stream after the other's.
struct Worker {
  std::condition_variable changed;
  Stream* stream = nullptr;  // guarded by the runtime's mutex of workers
};

struct Settings {
  int64_t delay_us = 0;
  double delay_probability = 0.0;
  uint64_t seed = 0;
  bool synchronous = false;
  bool stacks = false;
  bool execute = true;
  bool track_pinned = true;
};

class Runtime {
 public:
  static Runtime& get();

  // Set once, when the extension is loaded.
  void set_in_backward(bool (*in_backward)()) { checker_.in_backward = in_backward; }
  void (*on_worker_start)() = nullptr;
  std::string (*python_stack)() = nullptr;
  void (*without_gil)(const std::function<void()>& wait) = nullptr;  // a worker may need the GIL to get on

  Settings settings();
  void configure(const Settings& settings);
  void enable_checker(bool on);
  bool checker_enabled();
  int num_devices() const { return num_devices_; }
  void set_num_devices(int count);

  // Streams. Id 0 is the default stream of each device; other ids are unique in the process.
  Stream& stream(int device, int64_t id);
  Stream& new_stream(int device, const std::string& name = "");
  Stream& pool_stream(int device);

  // Launch: check, then enqueue. The only door through which device bytes are touched.
  void launch(Stream& stream, const std::string& op, const std::vector<Operand>& operands, std::function<void()> kernel);

  MarkPtr record(Stream& stream);
  void wait(Stream& stream, const MarkPtr& mark);
  // Hold the stream back without promising it to the program: the checker does not learn of it.
  void hold_back(Stream& stream, const MarkPtr& mark);

  // The host waits, with the GIL released.
  void synchronize(const MarkPtr& mark);
  void synchronize(Stream& stream);
  void synchronize_device(int device);
  void drain(std::chrono::milliseconds limit);  // at exit: bounded, and silent about failures
  bool query(const MarkPtr& mark);
  bool query(Stream& stream);

  BlockPtr allocate(size_t size, Stream& home);
  BlockPtr allocate_pinned(size_t size);
  void release(const BlockPtr& block);
  void record_use(const BlockPtr& block, const Stream& stream);
  void touch_on_host(const std::string& op, const std::vector<Operand>& operands);

  Clock publish();
  void receive(const Clock& clock);

  void fail(const std::string& message);
  bool has_failed() const { return failed_; }
  void raise_if_failed();

  std::vector<ReportRecord> take_reports();
  int64_t bytes_in_use(int device);
  int64_t peak_bytes(int device);
  void reset_peak(int device);

 private:
  Runtime() = default;
  Stream& add_stream(int device, int64_t id, const std::string& name);
  void enqueue(Stream& stream, Task task);
  void assign_worker(Stream& stream);
  void work(Stream* stream);
  void run_queue(Stream& stream);
  bool is_idle(Stream& stream);
  void block_host(const MarkPtr& mark);
  std::vector<Stream*> streams_of(int device);

  static constexpr int kMaxStreams = 2048;  // never reused below this: a reused stream is ordered, and hides races
  static constexpr size_t kPoolSize = 32;   // streams for callbacks of futures rotate, as on CUDA

  // Guards the checker, the table of streams and the order of all queues, see checker.h. Nobody calls Python, runs a
  // kernel or waits while holding it.
  std::mutex mutex_;
  Checker checker_;
  Settings settings_;
  std::atomic<int> num_devices_{1};
  std::map<int, std::unique_ptr<Stream>> default_streams_;
  std::vector<std::unique_ptr<Stream>> streams_;  // id = position + 1
  int num_slots_ = 0;
  std::mutex workers_mutex_;  // taken last
  std::vector<Worker*> free_workers_;
  std::map<int, std::vector<Stream*>> pools_;
  std::map<int, size_t> next_in_pool_;
  uint64_t num_blocks_ = 0;
  std::map<int, int64_t> bytes_, peak_bytes_;
  std::atomic<uint64_t> num_launches_{0};
  std::atomic<bool> stacks_{false}, execute_{true}, synchronous_{false};
  std::atomic<bool> failed_{false};
  std::mutex failure_mutex_;
  std::string failure_;
};

// The calling thread's current device and, per device, current stream.
int current_device();
int exchange_device(int device);
int64_t current_stream_id(int device);
int64_t exchange_stream(int device, int64_t id);
inline Stream& current_stream(int device) { return Runtime::get().stream(device, current_stream_id(device)); }

}  // namespace zerolap_sim
