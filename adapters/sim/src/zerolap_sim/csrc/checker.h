// The happens-before checker: who may touch which bytes when. No torch, no threads, no real memory traffic.
//
// Theory of operation. Every stream counts its launches; a vector clock says, per stream, up to which launch one has
// certainly been overtaken by now. Clocks travel along the edges that a real device guarantees, and along no others:
//
//   launch on a stream       the launch comes after everything launched on that stream before, and after everything
//                            the launching host thread has synchronised with
//   event recorded           the event carries the stream's clock
//   stream waits for event   the stream's clock takes in the event's
//   host waits for event     the *calling thread's* clock takes in the event's (also: a query that answered "done")
//   memory freed             the next tenant comes after what the home stream has waited for, and after what
//                            record_stream promised at the time of the free
//
// Two accesses to the same bytes, one of them a write, of which neither is ordered before the other, are a race. The
// verdict depends on the order in which the program launched things, never on how fast the streams ran.
//
// [Note: host threads] What a thread learned by waiting is its own. It reaches other threads only where that can be
// seen: through a stream both launch on; through the autograd engine, whose threads act for the thread that called
// backward (see `in_backward`); at a thread's first use of the device, when it takes over all that is known; and
// through the hand-overs that Python reports (see hand_over.py).
//
// Nothing here locks: the runtime calls it under one mutex, the same that fixes the order of the queues. Were they two,
// the order that is checked could differ from the order that runs.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace zerolap_sim {

using Clock = std::vector<uint64_t>;  // one entry per stream, by slot; a missing entry is zero

inline void join(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size(), 0);
  for (size_t i = 0; i < from.size(); ++i)
    if (into[i] < from[i]) into[i] = from[i];
}
inline uint64_t entry(const Clock& clock, size_t slot) { return slot < clock.size() ? clock[slot] : 0; }

// What a stream is called in reports.
struct StreamLabel {
  int slot = 0;
  int64_t id = 0;
  int device = 0;
  std::string name;
};

// The bytes of one tensor. A tensor with holes keeps its runs, so that two interleaved views are not taken for a race;
// past kMaxRuns it is taken as dense.
struct Region {
  using Run = std::pair<uintptr_t, uintptr_t>;
  static constexpr size_t kMaxRuns = 1024;
  uintptr_t lo = 0, hi = 0;
  std::shared_ptr<const std::vector<Run>> runs;  // ascending; null when dense

  bool overlaps(const Region& other) const;
  bool covers(const Region& other) const;
};

// One launch on a stream, shared by the accesses that it made.
struct Launch {
  std::string op;
  StreamLabel stream;
  uint64_t tick = 0;
  uint64_t epoch = 0;
  std::string stack;  // empty unless stacks are recorded
};

// Shape and type of the tensor through which bytes were touched; for the report only.
struct TensorNote {
  std::vector<int64_t> sizes;
  const char* dtype = "";
};

struct Access {
  Region region;
  TensorNote tensor;
  bool write = false;
  std::shared_ptr<const Launch> launch;
};

struct Block;
using BlockPtr = std::shared_ptr<Block>;

// An access to a tenant that is gone, which nothing orders before the next tenant of the same memory.
struct Hazard {
  Access access;
  uint64_t block_number = 0;
  size_t block_size = 0;
  uintptr_t block_start = 0;
};

// One allocation. Kernels in a queue hold the block, torch's storage holds only the tenancy: after a missing
// record_stream a kernel reads poison, as on a card, and not freed heap.
struct Block {
  void* data = nullptr;
  size_t size = 0;
  uint64_t number = 0;     // counts allocations; names the block in reports
  int device = 0;
  int home = 0;            // slot of the stream it was allocated on
  bool is_pinned = false;  // host memory that streams copy from and to
  std::set<int> used_by;   // slots named by record_stream
  std::vector<Access> history;
  std::vector<Hazard> hazards;        // of earlier tenants
  std::vector<BlockPtr> takes_over;   // freed blocks whose memory this one may be: poisoned at its first use
  Block() = default;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block();
};

struct Operand {
  BlockPtr block;
  Region region;
  TensorNote tensor;
  bool write = false;
};

// One side of a report.
struct Side {
  std::string op;
  std::string stream;
  int64_t stream_id = 0;
  int device = 0;
  bool write = false;
  TensorNote tensor;
  uint64_t block_number = 0;
  size_t block_size = 0;
  size_t first_byte = 0, end_byte = 0;
  std::string stack;
};

struct ReportRecord {
  std::string kind;
  Side first, second;
  uint64_t count = 1;
};

class Checker {
 public:
  struct HostThread {
    Clock known;
    std::atomic<bool> alive{true};  // cleared by the ending thread itself, outside the runtime's mutex
  };

  bool (*in_backward)() = nullptr;  // is the calling thread at work for the autograd engine?

  void enable(bool on);
  bool enabled() const { return enabled_; }

  // Streams. The caller makes slots 0, 1, 2, ... as it makes streams.
  void launched(const StreamLabel& stream, const std::string& op, const std::string& stack,
                const std::vector<Operand>& operands);
  Clock recorded(int slot);
  void waits(int slot, const Clock& clock);

  // The calling host thread.
  void host_learns(const Clock& clock);
  void host_learns_stream(int slot);
  void host_touches(const std::string& op, const std::string& stack, const Operand& operand);
  Clock host_publishes();
  void host_receives(const Clock& clock);

  // Memory.
  void freed(const BlockPtr& block);
  void allocated(Block& block);

  std::vector<ReportRecord> take_reports();

 private:
  HostThread& self();
  Clock& stream_clock(int slot);
  void take_in_host(Clock& clock);
  bool is_before(const Access& access, const Clock& clock) const;
  void remember(Block& block, Access access, const Clock& clock);
  void forget_what_all_know(Block& block);
  void report(const std::string& kind, Side first, Side second);
  Side side(const Access& access, uint64_t block_number, size_t block_size, uintptr_t block_start) const;

  static constexpr size_t kLongHistory = 256;   // from here on, look for accesses that every thread knows to be over
  static constexpr size_t kMaxHistory = 4096;   // beyond, the oldest are dropped, and a race with them is missed
  static constexpr size_t kMaxReports = 1000;

  bool enabled_ = true;
  uint64_t epoch_ = 0;  // accesses from before the checker was last switched on say nothing: clocks stood still
  std::deque<Clock> streams_;
  std::deque<HostThread> hosts_;
  Clock learned_in_backward_;  // what engine threads learned; known to all, see [Note: host threads]
  std::map<int, std::vector<Hazard>> freed_;  // by home slot
  std::vector<ReportRecord> reports_;
  std::map<std::string, size_t> report_index_;
};

}  // namespace zerolap_sim
