// The process group of the simulated device: collectives ordered by streams, moved by an inner Gloo group.
//
// A collective is a kernel on the group's communication stream. That stream first waits for the caller's current stream;
// Work::wait() makes the caller's current stream wait for the collective, and never the host (but for barriers). The
// future is complete when the call returns, with its events recorded on the communication stream. The work keeps the
// tensors alive until it is waited for or dies; nothing is recorded with the allocator, as in NCCL's group since torch
// 2.8, so that dropping both too early is an error here as it is there.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tensors.h"
#include "versions.h"

namespace zerolap_sim {

using Tensors = std::vector<at::Tensor>;
using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

enum class Fault { None, Failure, Timeout };

// Let the collective of that name fail on this rank, after `after` others of that name.
void inject(const std::string& collective, Fault fault, int after);

// One collective, from the call to the kernel. `begin` and `finish` run on the communication stream; between them the
// works that `begin` started are waited for. All parts of a coalesced batch begin before the first is waited for.
struct Collective {
  std::string name;
  c10d::OpType type = c10d::OpType::UNKNOWN;
  Tensors inputs, outputs;
  std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
  std::function<Works(c10d::Backend& inner)> begin;
  std::function<void()> finish;
  uint64_t sequence = 0;
  Fault fault = Fault::None;
  int device = -1;  // only where there are no tensors to tell
};

class SimBackend final : public c10d::Backend {
 public:
  SimBackend(c10::intrusive_ptr<c10d::Backend> inner, std::string name, std::chrono::milliseconds timeout);

  const std::string getBackendName() const override { return options_->backend; }
  c10::intrusive_ptr<Options> getBackendOptions() MAY_OVERRIDE { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) MAY_OVERRIDE;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return num_collectives_; }

  bool supportsCoalescing() const MAY_OVERRIDE { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  WorkPtr allreduce(Tensors&, const c10d::AllreduceOptions&) override;
  WorkPtr allreduce_coalesced(Tensors&, const c10d::AllreduceCoalescedOptions&) override;
  WorkPtr reduce(Tensors&, const c10d::ReduceOptions&) override;
  WorkPtr broadcast(Tensors&, const c10d::BroadcastOptions&) override;
  WorkPtr allgather(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override;
  WorkPtr _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors&, Tensors&, const c10d::AllgatherOptions&) override;
  WorkPtr reduce_scatter(Tensors&, std::vector<Tensors>&, const c10d::ReduceScatterOptions&) override;
  WorkPtr _reduce_scatter_base(at::Tensor&, at::Tensor&, const c10d::ReduceScatterOptions&) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors&, Tensors&, const c10d::ReduceScatterOptions&) override;
  WorkPtr alltoall(Tensors&, Tensors&, const c10d::AllToAllOptions&) override;
  WorkPtr alltoall_base(at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&,
                        const c10d::AllToAllOptions&) override;
  WorkPtr gather(std::vector<Tensors>&, Tensors&, const c10d::GatherOptions&) override;
  WorkPtr scatter(Tensors&, std::vector<Tensors>&, const c10d::ScatterOptions&) override;
  WorkPtr send(Tensors&, int to, int tag) override;
  WorkPtr recv(Tensors&, int from, int tag) override;
  WorkPtr recvAnysource(Tensors&, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions&) override;

 private:
  WorkPtr issue(Collective collective);
  WorkPtr issue_batch(std::vector<Collective> batch, const std::string& name, int device);
  Stream& communication_stream(int device);
  Collective reduce_in_place(const at::Tensor& t, const c10d::ReduceOp& op, std::chrono::milliseconds timeout, int root);
  Collective gather_parts(Tensors parts, const at::Tensor& mine, std::chrono::milliseconds timeout);
  Collective reduce_parts(const at::Tensor& into, Tensors parts, const c10d::ReduceOp& op,
                          std::chrono::milliseconds timeout);
  Collective exchange_parts(const std::string& name, c10d::OpType type, Tensors out, Tensors in,
                            std::chrono::milliseconds timeout);
  Tensors equal_parts(const at::Tensor& t) const;
  int next_tag();
  std::string where() const;

  const c10::intrusive_ptr<c10d::Backend> inner_;
  const c10::intrusive_ptr<Options> options_;
  std::map<int, Stream*> streams_;  // by device
  uint64_t num_collectives_ = 0;
  uint64_t num_messages_ = 0;
  int last_device_ = -1;
  MarkPtr last_end_;
  bool is_coalescing_ = false;
  std::vector<Collective> coalesced_;
};

}  // namespace zerolap_sim
