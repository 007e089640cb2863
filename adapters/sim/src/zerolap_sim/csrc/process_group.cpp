// The process group of the simulated device, see process_group.h.
#include "process_group.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <c10/core/StreamGuard.h>

#include <sstream>
#include <thread>

namespace zerolap_sim {

using c10d::OpType;
using c10d::ReduceOp;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

static Runtime& rt() { return Runtime::get(); }

// ---- injected faults -------------------------------------------------------------------------------------------------

namespace {

struct Injection {
  std::string collective;
  Fault fault;
  int after;
};
std::mutex injections_mutex;
std::vector<Injection> injections;

// Decided at the call, not in the kernel: the count follows the program, not the streams.
Fault draw_fault(const std::string& collective) {
  std::lock_guard<std::mutex> lock(injections_mutex);
  for (auto it = injections.begin(); it != injections.end(); ++it) {
    if (it->collective != collective || it->after-- > 0) continue;
    const Fault fault = it->fault;
    injections.erase(it);
    return fault;
  }
  return Fault::None;
}

}  // namespace

void inject(const std::string& collective, Fault fault, int after) {
  std::lock_guard<std::mutex> lock(injections_mutex);
  injections.push_back({collective, fault, after});
}

// ---- the work --------------------------------------------------------------------------------------------------------

namespace {

class SimWork final : public c10d::Work {
 public:
  SimWork(int rank, OpType type, uint64_t sequence, Stream& stream, Tensors outputs, Tensors stash)
      : Work(rank, type),
        device_(stream.label.device),
        sequence_(sequence),
        end_(rt().record(stream)),
        outputs_(std::move(outputs)),
        stash_(std::move(stash)) {
    const c10::Device device(kDeviceType, static_cast<c10::DeviceIndex>(device_));
    future_ = c10::make_intrusive<at::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                      std::vector<c10::Device>{device});
    c10::StreamGuard guard(c10::Stream(c10::Stream::UNSAFE, device, stream.label.id));
    future_->markCompleted(at::IValue(outputs_));
  }

  bool isCompleted() override { return rt().query(end_); }
  bool isSuccess() const override { return !rt().has_failed(); }
  std::exception_ptr exception() const override {
    try {
      rt().raise_if_failed();
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }
  bool wait(milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    rt().raise_if_failed();
    Stream& current = current_stream(device_);
    rt().wait(current, end_);
    if (opType_ == OpType::BARRIER) rt().synchronize(current);  // a barrier is for the host
    stash_.clear();
  }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<at::ivalue::Future> getFuture() override { return future_; }
  uint64_t getSequencenumber() const override { return sequence_; }
  const MarkPtr& end() const { return end_; }

 private:
  const int device_;
  const uint64_t sequence_;
  const MarkPtr end_;
  const Tensors outputs_;
  Tensors stash_;  // freed earlier, the allocator hands their memory to the next tensor while the collective runs
  c10::intrusive_ptr<at::ivalue::Future> future_;
};

// What a call between startCoalescing and endCoalescing returns: nothing has been issued yet.
class NotYetIssued final : public c10d::Work {
 public:
  NotYetIssued() : Work(-1, OpType::COALESCED) {}
  bool isCompleted() override { return false; }
  bool wait(milliseconds) override {
    TORCH_CHECK(false, "simulated device: this call is part of a coalesced batch; wait for the batch instead");
  }
};

// ---- running a batch on the communication stream ---------------------------------------------------------------------

std::string seconds(milliseconds time) {
  std::ostringstream out;
  out << static_cast<double>(time.count()) / 1000 << " s";
  return out.str();
}

[[noreturn]] void raise(const Collective& c, const std::string& where, bool timed_out, const std::string& cause) {
  throw std::runtime_error(c.name + " with sequence number " + std::to_string(c.sequence) + " on " + where +
                           (timed_out ? " timed out after " + seconds(c.timeout)
                                      : " failed, within its timeout of " + seconds(c.timeout)) +
                           ": " + cause);
}

void suffer_fault(const Collective& c, const std::string& where) {
  if (c.fault == Fault::Failure) raise(c, where, false, "injected failure");
  if (c.fault != Fault::Timeout) return;
  const auto deadline = steady_clock::now() + c.timeout;
  while (steady_clock::now() < deadline && !rt().has_failed()) std::this_thread::sleep_for(milliseconds(5));
  raise(c, where, true, "injected: it never completed");
}

void run(std::vector<Collective>& batch, c10d::Backend& inner, const std::string& where) {
  at::AutoDispatchBelowADInplaceOrView guard;
  const auto start = steady_clock::now();
  std::vector<Works> works;
  const Collective* current = nullptr;
  try {
    for (const auto& c : batch) {
      current = &c;
      suffer_fault(c, where);
      works.push_back(c.begin(inner));
    }
    for (size_t i = 0; i < batch.size(); ++i) {
      current = &batch[i];
      for (const auto& work : works[i]) {
        const auto left = std::chrono::duration_cast<milliseconds>(start + current->timeout - steady_clock::now());
        work->wait(std::max(left, milliseconds(1)));
      }
    }
    for (const auto& c : batch) {
      current = &c;
      if (c.finish) c.finish();
    }
  } catch (const std::exception& error) {
    const auto* as_torch = dynamic_cast<const c10::Error*>(&error);
    const std::string cause = as_torch ? as_torch->what_without_backtrace() : error.what();
    if (current->fault != Fault::None) throw;  // has said it all
    raise(*current, where, steady_clock::now() - start >= current->timeout, cause);
  }
}

}  // namespace

// ---- issuing ---------------------------------------------------------------------------------------------------------

SimBackend::SimBackend(c10::intrusive_ptr<c10d::Backend> inner, std::string name, milliseconds timeout)
    : Backend(inner->getRank(), inner->getSize()),
      inner_(std::move(inner)),
      options_(c10::make_intrusive<Options>(std::move(name), timeout)) {}

void SimBackend::setTimeout(milliseconds timeout) {
  options_->timeout = timeout;
  [timeout](auto& inner) {
    if constexpr (requires { inner.setTimeout(timeout); }) inner.setTimeout(timeout);
  }(*inner_);
}

std::string SimBackend::where() const {
  return "rank " + std::to_string(rank_) + " of " + std::to_string(size_) + ", group '" + getGroupUid() + "'";
}

Stream& SimBackend::communication_stream(int device) {
  auto& stream = streams_[device];
  if (!stream) stream = &rt().new_stream(device, "communication stream of group '" + getGroupUid() + "'");
  return *stream;
}

WorkPtr SimBackend::issue(Collective c) {
  if (c.timeout == c10d::kUnsetTimeout) c.timeout = options_->timeout;
  const bool is_message = c.type == OpType::SEND || c.type == OpType::RECV || c.type == OpType::RECVANYSOURCE;
  c.sequence = is_message ? ++num_messages_ : ++num_collectives_;
  c.fault = draw_fault(c.name);
  int device = c.device;
  for (const Tensors* tensors : {&c.inputs, &c.outputs})
    for (const auto& t : *tensors) {
      TORCH_CHECK_VALUE(is_on_device(t), "simulated device: ", c.name, " takes tensors of the simulated device, got one on ",
                        t.device());
      TORCH_CHECK_VALUE(device < 0 || device == t.device().index(), "simulated device: the tensors of one ", c.name,
                        " must be on one device, got devices ", device, " and ", t.device().index());
      device = t.device().index();
    }
  if (device < 0) device = current_device();
  if (is_coalescing_) {
    coalesced_.push_back(std::move(c));
    return c10::make_intrusive<NotYetIssued>();
  }
  std::vector<Collective> batch;
  const std::string name = c.name;
  batch.push_back(std::move(c));
  return issue_batch(std::move(batch), name, device);
}

WorkPtr SimBackend::issue_batch(std::vector<Collective> batch, const std::string& name, int device) {
  Stream& stream = communication_stream(device);
  rt().wait(stream, rt().record(current_stream(device)));
  // The inner group pairs its messages by the order of calls, so two devices' streams must take turns.
  if (last_end_ && last_device_ != device) rt().hold_back(stream, last_end_);
  std::vector<Operand> operands;
  Tensors outputs, stash;
  for (auto& c : batch) {
    for (const auto& t : c.inputs)
      if (t.numel() > 0) operands.push_back(operand(t, false));
    for (const auto& t : c.outputs)
      if (t.numel() > 0) operands.push_back(operand(t, true));
    const Tensors& results = c.outputs.empty() ? c.inputs : c.outputs;
    outputs.insert(outputs.end(), results.begin(), results.end());
    stash.insert(stash.end(), c.inputs.begin(), c.inputs.end());
    stash.insert(stash.end(), c.outputs.begin(), c.outputs.end());
    c.inputs.clear();  // the kernel holds memory, not tensors
    c.outputs.clear();
  }
  const OpType type = batch.size() == 1 ? batch.front().type : OpType::COALESCED;
  const uint64_t sequence = batch.front().sequence;
  auto shared = std::make_shared<std::vector<Collective>>(std::move(batch));
  rt().launch(stream, name, operands, [shared, inner = inner_, place = where()] { run(*shared, *inner, place); });
  auto work = c10::make_intrusive<SimWork>(rank_, type, sequence, stream, std::move(outputs), std::move(stash));
  last_end_ = work->end();
  last_device_ = device;
  return work;
}

void SimBackend::startCoalescing() {
  TORCH_CHECK(!is_coalescing_, "simulated device: coalescing was already started on this group");
  is_coalescing_ = true;
}

WorkPtr SimBackend::endCoalescing() {
  TORCH_CHECK(is_coalescing_, "simulated device: coalescing was not started on this group");
  is_coalescing_ = false;
  auto batch = std::exchange(coalesced_, {});
  if (batch.empty()) return nullptr;
  const auto& c = batch.front();
  const int device = (c.outputs.empty() ? c.inputs : c.outputs).at(0).device().index();
  const std::string name = c.name + " and others, coalesced";
  return issue_batch(std::move(batch), name, device);
}

// ---- moving parts between ranks --------------------------------------------------------------------------------------

namespace {

Tensors aliases(const Tensors& tensors) {
  Tensors result;
  for (const auto& t : tensors) result.push_back(host_alias(t));
  return result;
}

// Send `parts[r]` to each other rank r and receive `into[r]` from it, either of any size, also none; undefined means
// no message. All by messages: any dtype, uneven sizes and the minimal number of bytes.
Works exchange(c10d::Backend& inner, const Tensors& into, const Tensors& parts, int tag) {
  Works works;
  for (int rank = 0; rank < inner.getSize(); ++rank) {
    if (rank == inner.getRank()) continue;
    if (into[rank].defined() && into[rank].numel() > 0) {
      Tensors one{into[rank]};
      works.push_back(inner.recv(one, rank, tag));
    }
  }
  for (int rank = 0; rank < inner.getSize(); ++rank) {
    if (rank == inner.getRank()) continue;
    if (parts[rank].defined() && parts[rank].numel() > 0) {
      Tensors one{parts[rank].contiguous()};
      works.push_back(inner.send(one, rank, tag));
    }
  }
  return works;
}

void accumulate(at::Tensor& total, const at::Tensor& part, const ReduceOp& op) {
  switch (static_cast<ReduceOp::RedOpType>(op)) {
    case ReduceOp::SUM:
    case ReduceOp::AVG: total.add_(part); break;
    case ReduceOp::PRODUCT: total.mul_(part); break;
    case ReduceOp::MIN: total.copy_(at::minimum(total, part)); break;
    case ReduceOp::MAX: total.copy_(at::maximum(total, part)); break;
    case ReduceOp::BAND: total.bitwise_and_(part); break;
    case ReduceOp::BOR: total.bitwise_or_(part); break;
    case ReduceOp::BXOR: total.bitwise_xor_(part); break;
    default: TORCH_CHECK(false, "this reduction is not supported");
  }
}

void divide(const at::Tensor& t, int by) {
  if (at::isIntegralType(t.scalar_type(), true)) {
    t.div_(by, "trunc");
  } else {
    t.div_(by);
  }
}

void check_reduction(const ReduceOp& op) {
  TORCH_CHECK_VALUE(op != ReduceOp::PREMUL_SUM && op != ReduceOp::UNUSED,
                    "simulated device: this reduction is not supported; use SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR");
}

const at::Tensor& the_only(const Tensors& tensors, const char* what) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "simulated device: ", what, " takes one tensor per rank, got ", tensors.size());
  return tensors.front();
}

const Tensors& the_only(const std::vector<Tensors>& lists, const char* what) {
  TORCH_CHECK_VALUE(lists.size() == 1, "simulated device: ", what, " takes one list of tensors per rank, got ", lists.size());
  return lists.front();
}

}  // namespace

// Tags of our own messages are far from those that callers use. They count collectives, which all ranks call in the
// same order.
int SimBackend::next_tag() { return (1 << 30) + static_cast<int>(num_collectives_ % (1 << 20)); }

Tensors SimBackend::equal_parts(const at::Tensor& t) const {
  TORCH_CHECK_VALUE(t.numel() % size_ == 0, "simulated device: ", t.numel(), " elements cannot be cut into ", size_,
                    " equal parts");
  TORCH_CHECK_VALUE(t.is_contiguous(), "simulated device: the tensor to cut must be contiguous");
  const int64_t each = t.numel() / size_;
  const at::Tensor flat = t.view({-1});
  Tensors parts;
  for (int rank = 0; rank < size_; ++rank) parts.push_back(flat.narrow(0, rank * each, each));
  return parts;
}

Collective SimBackend::exchange_parts(const std::string& name, OpType type, Tensors out, Tensors in,
                                      milliseconds timeout) {
  Collective c{name, type, {}, {}, timeout, {}, {}};
  auto into = std::make_shared<Tensors>(size_), landing = std::make_shared<Tensors>(size_),
       parts = std::make_shared<Tensors>(size_);
  for (int rank = 0; rank < size_; ++rank) {
    if (out[rank].defined()) {
      c.outputs.push_back(out[rank]);
      into->at(rank) = host_alias(out[rank]);
    }
    if (in[rank].defined()) {
      c.inputs.push_back(in[rank]);
      parts->at(rank) = host_alias(in[rank]);
    }
  }
  c.begin = [into, landing, parts, tag = next_tag()](c10d::Backend& inner) {
    for (size_t rank = 0; rank < into->size(); ++rank) {
      const at::Tensor& t = into->at(rank);
      if (t.defined()) landing->at(rank) = t.is_contiguous() ? t : at::empty_like(t, at::MemoryFormat::Contiguous);
    }
    return exchange(inner, *landing, *parts, tag);
  };
  c.finish = [into, landing, parts, me = rank_] {
    for (size_t rank = 0; rank < into->size(); ++rank)
      if (static_cast<int>(rank) != me && into->at(rank).defined() && !into->at(rank).is_same(landing->at(rank)))
        into->at(rank).copy_(landing->at(rank));
    if (into->at(me).defined() && parts->at(me).defined() && into->at(me).numel() > 0)
      into->at(me).copy_(parts->at(me).view_as(into->at(me)));
  };
  return c;
}

Collective SimBackend::gather_parts(Tensors parts, const at::Tensor& mine, milliseconds timeout) {
  TORCH_CHECK_VALUE(static_cast<int>(parts.size()) == size_, "simulated device: all_gather needs one output per rank, ",
                    size_, ", got ", parts.size());
  TORCH_CHECK_VALUE(parts[rank_].numel() == mine.numel(), "simulated device: all_gather on rank ", rank_, " sends ",
                    mine.numel(), " elements but has room for ", parts[rank_].numel(), " from itself");
  auto c = exchange_parts("all_gather", OpType::ALLGATHER, std::move(parts), Tensors(size_, mine), timeout);
  c.inputs.resize(1);  // the same tensor goes to everybody
  return c;
}

// The parts are added in the order of the ranks, so the result does not depend on who was faster, and for two ranks is
// bit for bit that of an all-reduce.
Collective SimBackend::reduce_parts(const at::Tensor& into, Tensors parts, const ReduceOp& op, milliseconds timeout) {
  check_reduction(op);
  TORCH_CHECK_VALUE(static_cast<int>(parts.size()) == size_, "simulated device: reduce_scatter needs one input per rank, ",
                    size_, ", got ", parts.size());
  TORCH_CHECK_VALUE(parts[rank_].numel() == into.numel(), "simulated device: reduce_scatter on rank ", rank_,
                    " reduces a part of ", parts[rank_].numel(), " elements into ", into.numel());
  Collective c{"reduce_scatter", OpType::REDUCE_SCATTER, parts, {into}, timeout, {}, {}};
  auto sends = std::make_shared<Tensors>(aliases(parts));
  auto received = std::make_shared<Tensors>(size_);
  const at::Tensor target = host_alias(into);
  c.begin = [sends, received, me = rank_, tag = next_tag()](c10d::Backend& inner) {
    for (size_t rank = 0; rank < received->size(); ++rank)
      received->at(rank) = at::empty_like(sends->at(me), at::MemoryFormat::Contiguous);
    return exchange(inner, *received, *sends, tag);
  };
  c.finish = [sends, received, target, op, me = rank_, size = size_] {
    received->at(me) = sends->at(me);
    at::Tensor total = received->at(0).clone();
    for (int rank = 1; rank < size; ++rank) accumulate(total, received->at(rank), op);
    if (op == ReduceOp::AVG) divide(total, size);
    target.copy_(total.view_as(target));
  };
  return c;
}

// With a root: a reduce. Without (-1): an all-reduce. Both by Gloo, so that numbers are those of a CPU group.
Collective SimBackend::reduce_in_place(const at::Tensor& t, const ReduceOp& op, milliseconds timeout, int root) {
  check_reduction(op);
  Collective c{root < 0 ? "all_reduce" : "reduce", root < 0 ? OpType::ALLREDUCE : OpType::REDUCE, {}, {t}, timeout, {}, {}};
  const at::Tensor host = host_alias(t);
  const ReduceOp inner_op = op == ReduceOp::AVG ? ReduceOp(ReduceOp::SUM) : op;  // Gloo may or may not know AVG
  c.begin = [host, inner_op, root](c10d::Backend& inner) -> Works {
    if (host.numel() == 0) return {};
    Tensors one{host};
    if (root < 0) {
      c10d::AllreduceOptions options;
      options.reduceOp = inner_op;
      return {inner.allreduce(one, options)};
    }
    c10d::ReduceOptions options;
    options.reduceOp = inner_op;
    options.rootRank = root;
    return {inner.reduce(one, options)};
  };
  const bool averages = op == ReduceOp::AVG && (root < 0 || root == rank_);
  if (averages) c.finish = [host, size = size_] { divide(host, size); };
  return c;
}

// ---- the collectives -------------------------------------------------------------------------------------------------

WorkPtr SimBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return issue(reduce_in_place(the_only(tensors, "all_reduce"), options.reduceOp, options.timeout, -1));
}

WorkPtr SimBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  const bool nested = std::exchange(is_coalescing_, true);
  for (const auto& t : tensors) issue(reduce_in_place(t, options.reduceOp, options.timeout, -1));
  if (nested) return c10::make_intrusive<NotYetIssued>();
  return endCoalescing();
}

WorkPtr SimBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return issue(reduce_in_place(the_only(tensors, "reduce"), options.reduceOp, options.timeout,
                               static_cast<int>(options.rootRank)));
}

WorkPtr SimBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor& t = the_only(tensors, "broadcast");
  const int root = static_cast<int>(options.rootRank);
  Tensors out(size_), in(size_);
  if (rank_ == root) {
    in.assign(size_, t);
  } else {
    out[root] = t;
  }
  auto c = exchange_parts("broadcast", OpType::BROADCAST, std::move(out), std::move(in), options.timeout);
  if (rank_ == root) c.inputs = {t};
  return issue(std::move(c));
}

WorkPtr SimBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return issue(gather_parts(the_only(outputs, "all_gather"), the_only(inputs, "all_gather"), options.timeout));
}

WorkPtr SimBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  auto c = gather_parts(equal_parts(output), input.contiguous().view({-1}), options.timeout);
  c.outputs = {output};
  return issue(std::move(c));
}

WorkPtr SimBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "simulated device: ", outputs.size(), " outputs for ",
                    inputs.size(), " inputs");
  const bool nested = std::exchange(is_coalescing_, true);
  for (size_t i = 0; i < outputs.size(); ++i) _allgather_base(outputs[i], inputs[i], options);
  if (nested) return c10::make_intrusive<NotYetIssued>();
  return endCoalescing();
}

WorkPtr SimBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                   const c10d::ReduceScatterOptions& options) {
  return issue(reduce_parts(the_only(outputs, "reduce_scatter"), the_only(inputs, "reduce_scatter"), options.reduceOp,
                            options.timeout));
}

WorkPtr SimBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                         const c10d::ReduceScatterOptions& options) {
  const at::Tensor dense = input.contiguous();
  auto c = reduce_parts(output, equal_parts(dense), options.reduceOp, options.timeout);
  c.inputs = {dense};
  return issue(std::move(c));
}

WorkPtr SimBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                    const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "simulated device: ", outputs.size(), " outputs for ",
                    inputs.size(), " inputs");
  const bool nested = std::exchange(is_coalescing_, true);
  for (size_t i = 0; i < outputs.size(); ++i) _reduce_scatter_base(outputs[i], inputs[i], options);
  if (nested) return c10::make_intrusive<NotYetIssued>();
  return endCoalescing();
}

WorkPtr SimBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  TORCH_CHECK_VALUE(static_cast<int>(outputs.size()) == size_ && static_cast<int>(inputs.size()) == size_,
                    "simulated device: all_to_all needs one input and one output per rank, ", size_, ", got ",
                    inputs.size(), " and ", outputs.size());
  return issue(exchange_parts("all_to_all", OpType::ALLTOALL, outputs, inputs, options.timeout));
}

WorkPtr SimBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                  std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  auto cut = [&](const at::Tensor& t, const std::vector<int64_t>& splits) -> Tensors {
    if (!splits.empty()) return t.split_with_sizes(splits, 0);
    TORCH_CHECK_VALUE(t.size(0) % size_ == 0, "simulated device: all_to_all cannot cut ", t.size(0), " rows into ",
                      size_, " equal parts");
    return t.split_with_sizes(std::vector<int64_t>(size_, t.size(0) / size_), 0);
  };
  auto c = exchange_parts("all_to_all", OpType::ALLTOALL_BASE, cut(output, output_splits), cut(input, input_splits),
                          options.timeout);
  c.outputs = {output};
  c.inputs = {input};
  return issue(std::move(c));
}

WorkPtr SimBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const int root = static_cast<int>(options.rootRank);
  Tensors out(size_), in(size_);
  in[root] = the_only(inputs, "gather");
  if (rank_ == root) out = the_only(outputs, "gather");
  TORCH_CHECK_VALUE(static_cast<int>(out.size()) == size_, "simulated device: gather needs one output per rank, ", size_,
                    ", got ", out.size());
  return issue(exchange_parts("gather", OpType::GATHER, std::move(out), std::move(in), options.timeout));
}

WorkPtr SimBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  const int root = static_cast<int>(options.rootRank);
  Tensors out(size_), in(size_);
  out[root] = the_only(outputs, "scatter");
  if (rank_ == root) in = the_only(inputs, "scatter");
  TORCH_CHECK_VALUE(static_cast<int>(in.size()) == size_, "simulated device: scatter needs one input per rank, ", size_,
                    ", got ", in.size());
  return issue(exchange_parts("scatter", OpType::SCATTER, std::move(out), std::move(in), options.timeout));
}

// As in NCCL, a message occupies the communication stream until its partner has come. Two ranks that each send first
// and receive second stop each other, unless they batch the two (torch.distributed.batch_isend_irecv).
WorkPtr SimBackend::send(Tensors& tensors, int to, int tag) {
  const at::Tensor host = host_alias(the_only(tensors, "send"));
  Collective c{"send", OpType::SEND, tensors, {}, c10d::kUnsetTimeout, {}, {}};
  c.begin = [host, to, tag](c10d::Backend& inner) -> Works {
    Tensors one{host.contiguous()};
    return {inner.send(one, to, tag)};
  };
  return issue(std::move(c));
}

WorkPtr SimBackend::recv(Tensors& tensors, int from, int tag) {
  TORCH_CHECK_VALUE(the_only(tensors, "recv").is_contiguous(), "simulated device: recv needs a contiguous tensor");
  const at::Tensor host = host_alias(tensors.front());
  Collective c{"recv", OpType::RECV, {}, tensors, c10d::kUnsetTimeout, {}, {}};
  c.begin = [host, from, tag](c10d::Backend& inner) -> Works {
    Tensors one{host};
    return {inner.recv(one, from, tag)};
  };
  return issue(std::move(c));
}

WorkPtr SimBackend::recvAnysource(Tensors& tensors, int tag) {
  TORCH_CHECK_VALUE(the_only(tensors, "recv").is_contiguous(), "simulated device: recv needs a contiguous tensor");
  const at::Tensor host = host_alias(tensors.front());
  Collective c{"recv", OpType::RECVANYSOURCE, {}, tensors, c10d::kUnsetTimeout, {}, {}};
  c.begin = [host, tag](c10d::Backend& inner) -> Works {
    Tensors one{host};
    return {inner.recvAnysource(one, tag)};
  };
  return issue(std::move(c));
}

WorkPtr SimBackend::barrier(const c10d::BarrierOptions& options) {
  Collective c{"barrier", OpType::BARRIER, {}, {}, options.timeout, {}, {}};
  c.begin = [](c10d::Backend& inner) -> Works { return {inner.barrier()}; };
  if (options.device) c.device = options.device->index();
  if (!options.device_ids.empty()) c.device = static_cast<int>(options.device_ids.front());
  return issue(std::move(c));
}

}  // namespace zerolap_sim
