// The happens-before checker, see checker.h.
#include "checker.h"

#include <algorithm>
#include <cstdlib>

namespace zerolap_sim {

Block::~Block() { std::free(data); }

bool Region::overlaps(const Region& other) const {
  if (hi <= other.lo || other.hi <= lo) return false;
  if (!runs && !other.runs) return true;
  const std::vector<Run> mine = runs ? *runs : std::vector<Run>{{lo, hi}};
  const std::vector<Run> theirs = other.runs ? *other.runs : std::vector<Run>{{other.lo, other.hi}};
  for (size_t i = 0, k = 0; i < mine.size() && k < theirs.size();) {
    if (mine[i].second <= theirs[k].first) {
      ++i;
    } else if (theirs[k].second <= mine[i].first) {
      ++k;
    } else {
      return true;
    }
  }
  return false;
}

bool Region::covers(const Region& other) const {
  if (!runs) return lo <= other.lo && other.hi <= hi;
  return other.runs && *runs == *other.runs;
}

namespace {
// Marks the thread's record when the thread ends, so that a dead thread's ignorance does not keep history alive.
struct HostThreadHandle {
  Checker::HostThread* record = nullptr;
  ~HostThreadHandle() {
    if (record) record->alive = false;
  }
};
thread_local HostThreadHandle this_host;
}  // namespace

Checker::HostThread& Checker::self() {
  if (!this_host.record) {
    Clock known;
    for (const auto& other : hosts_) join(known, other.known);
    // The record of a thread that has ended is taken over; else make one, which a deque will not move.
    auto free = std::find_if(hosts_.begin(), hosts_.end(), [](const HostThread& host) { return !host.alive; });
    this_host.record = free != hosts_.end() ? &*free : &hosts_.emplace_back();
    this_host.record->known = std::move(known);
    this_host.record->alive = true;
  }
  return *this_host.record;
}

Clock& Checker::stream_clock(int slot) {
  if (streams_.size() <= static_cast<size_t>(slot)) streams_.resize(slot + 1);
  return streams_[slot];
}

void Checker::take_in_host(Clock& clock) {
  join(clock, self().known);
  join(clock, learned_in_backward_);
  if (in_backward && in_backward())
    for (const auto& host : hosts_) join(clock, host.known);
}

bool Checker::is_before(const Access& access, const Clock& clock) const {
  const Launch& launch = *access.launch;
  return launch.epoch != epoch_ || entry(clock, launch.stream.slot) >= launch.tick;
}

void Checker::enable(bool on) {
  if (on && !enabled_) {
    ++epoch_;
    freed_.clear();
  }
  enabled_ = on;
}

void Checker::launched(const StreamLabel& stream, const std::string& op, const std::string& stack,
                       const std::vector<Operand>& operands) {
  if (!enabled_) return;
  Clock& clock = stream_clock(stream.slot);
  take_in_host(clock);
  if (clock.size() <= static_cast<size_t>(stream.slot)) clock.resize(stream.slot + 1, 0);
  auto launch = std::make_shared<const Launch>(Launch{op, stream, ++clock[stream.slot], epoch_, stack});
  // First all checks, then all entries: an operand that appears twice does not race with itself.
  for (const auto& operand : operands) {
    Block& block = *operand.block;
    const auto start = reinterpret_cast<uintptr_t>(block.data);
    const Access access{operand.region, operand.tensor, operand.write, launch};
    for (const auto& earlier : block.history) {
      if (!(earlier.write || operand.write) || is_before(earlier, clock)) continue;
      if (earlier.launch == launch || !earlier.region.overlaps(operand.region)) continue;
      report("unordered access", side(earlier, block.number, block.size, start),
             side(access, block.number, block.size, start));
    }
    for (const auto& hazard : block.hazards)
      if (!is_before(hazard.access, clock))
        report("memory reused while in use",
               side(hazard.access, hazard.block_number, hazard.block_size, hazard.block_start),
               side(access, block.number, block.size, start));
    block.hazards.clear();  // either ordered before this access, or reported just now
  }
  for (const auto& operand : operands)
    remember(*operand.block, {operand.region, operand.tensor, operand.write, launch}, clock);
}

// Drop what the new access makes redundant: whoever comes after the new one also comes after those, and whoever does
// not is caught on the new one.
void Checker::remember(Block& block, Access access, const Clock& clock) {
  auto& history = block.history;
  auto redundant = [&](const Access& earlier) {
    return (access.write || !earlier.write) && is_before(earlier, clock) && access.region.covers(earlier.region);
  };
  history.erase(std::remove_if(history.begin(), history.end(), redundant), history.end());
  if (history.size() >= kLongHistory) forget_what_all_know(block);
  if (history.size() >= kMaxHistory) history.erase(history.begin());
  history.push_back(std::move(access));
}

void Checker::forget_what_all_know(Block& block) {
  auto over = [&](const Access& access) {
    return std::all_of(hosts_.begin(), hosts_.end(), [&](const HostThread& host) {
      return !host.alive || is_before(access, host.known) || is_before(access, learned_in_backward_);
    });
  };
  block.history.erase(std::remove_if(block.history.begin(), block.history.end(), over), block.history.end());
}

Clock Checker::recorded(int slot) {
  if (!enabled_) return {};
  Clock& clock = stream_clock(slot);
  take_in_host(clock);
  return clock;
}

void Checker::waits(int slot, const Clock& clock) {
  if (enabled_) join(stream_clock(slot), clock);
}

void Checker::host_learns(const Clock& clock) {
  if (!enabled_) return;
  join(self().known, clock);
  if (in_backward && in_backward()) join(learned_in_backward_, clock);
}

void Checker::host_learns_stream(int slot) {
  if (enabled_) host_learns(Clock(stream_clock(slot)));
}

Clock Checker::host_publishes() { return self().known; }

void Checker::host_receives(const Clock& clock) { join(self().known, clock); }

void Checker::host_touches(const std::string& op, const std::string& stack, const Operand& operand) {
  if (!enabled_) return;
  Clock clock;
  take_in_host(clock);
  const Block& block = *operand.block;
  const auto start = reinterpret_cast<uintptr_t>(block.data);
  for (const auto& earlier : block.history) {
    if (!(earlier.write || operand.write) || is_before(earlier, clock)) continue;
    if (!earlier.region.overlaps(operand.region)) continue;
    auto launch = std::make_shared<const Launch>(Launch{op, {-1, -1, -1, "host"}, 0, epoch_, stack});
    const std::string kind = std::string("host ") + (operand.write ? "write" : "read") + " before the device " +
                             (earlier.write ? "wrote" : "read");
    report(kind, side(earlier, block.number, block.size, start),
           side({operand.region, operand.tensor, operand.write, launch}, block.number, block.size, start));
  }
}

// The earliest legal reuse of a freed block is by the next allocation on its home stream.
void Checker::freed(const BlockPtr& block) {
  if (!enabled_ || block->is_pinned) return;
  Clock safe = stream_clock(block->home);
  take_in_host(safe);
  for (int slot : block->used_by) join(safe, stream_clock(slot));
  for (const auto& access : block->history)
    if (access.launch->stream.slot != block->home && !is_before(access, safe))
      freed_[block->home].push_back({access, block->number, block->size, reinterpret_cast<uintptr_t>(block->data)});
}

// Any allocation may get any memory freed before, so each takes over all hazards that are still open.
void Checker::allocated(Block& block) {
  auto found = enabled_ ? freed_.find(block.home) : freed_.end();
  if (found == freed_.end()) return;
  Clock clock = stream_clock(block.home);
  take_in_host(clock);
  auto& hazards = found->second;
  auto over = [&](const Hazard& hazard) { return is_before(hazard.access, clock); };
  hazards.erase(std::remove_if(hazards.begin(), hazards.end(), over), hazards.end());
  if (hazards.size() > kMaxHistory) hazards.erase(hazards.begin(), hazards.end() - kMaxHistory);
  block.hazards = hazards;
  if (hazards.empty()) freed_.erase(found);
}

Side Checker::side(const Access& access, uint64_t block_number, size_t block_size, uintptr_t block_start) const {
  const Launch& launch = *access.launch;
  return {launch.op,    launch.stream.name, launch.stream.id,
          launch.stream.device,             access.write,
          access.tensor, block_number,      block_size,
          static_cast<size_t>(access.region.lo - block_start),
          static_cast<size_t>(access.region.hi - block_start), launch.stack};
}

void Checker::report(const std::string& kind, Side first, Side second) {
  std::string key = kind;
  for (const Side* s : {&first, &second})
    key += "|" + s->op + "|" + s->stream + "|" + std::to_string(s->device) + (s->write ? "|w" : "|r");
  auto [found, is_new] = report_index_.try_emplace(key, reports_.size());
  if (!is_new) {
    ++reports_[found->second].count;
  } else if (reports_.size() < kMaxReports) {
    reports_.push_back({kind, std::move(first), std::move(second), 1});
  } else {
    report_index_.erase(found);
  }
}

std::vector<ReportRecord> Checker::take_reports() {
  report_index_.clear();
  return std::exchange(reports_, {});
}

}  // namespace zerolap_sim
