// The products of a mixture of experts, with the weights of the chosen experts alone.
//
// The choices are ordered by expert. An expert's weight is a run of panels among those of all, and
// its rows are some groups, so that a task is one of `linear`: a panel times some groups of its
// expert. Tasks follow each other through the panels of an expert, then to the next expert: a single
// token's weights are shared out among the threads as evenly as those of a prompt.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "activation.h"
#include "experts.h"
#include "linear_block.h"
#include "linear_rows.h"
#include "shares.h"
#include "tile_block.h"

// The choices of experts, ordered by expert.
namespace trident {
namespace {

// The rows of a product are choices, those of an expert adjacent; they are split into groups of
// nearly equal size, each of one expert.
class ExpertOrder {
 public:
  // Some groups of one expert, multiplied with a panel by one task.
  struct Block {
    int64_t expert, begin, end;
  };

  // `experts` [size] are the experts of all choices, -1 for none. Adds their numbers to `totals`. A
  // group has at most `most` rows.
  ExpertOrder(
      const int32_t* experts, int64_t size, int64_t num_experts, int64_t most, int64_t* totals)
      : places(size, -1) {
    std::vector<int64_t> begins(num_experts + 1);
    for (int64_t i = 0; i < size; ++i) {
      if (experts[i] >= 0) {
        ++begins[experts[i] + 1];
      }
    }
    for (int64_t expert = 0; expert < num_experts; ++expert) {
      const int64_t chosen = begins[expert + 1], first = count;
      totals[expert] += chosen;
      begins[expert + 1] += begins[expert];
      const int64_t groups = (chosen + most - 1) / most;
      for (int64_t group = 0; group < groups; ++group, ++count) {
        begins_.push_back(begins[expert] + group * chosen / groups);
      }
      if (groups > 0) {
        height_ = std::max(height_, (chosen + groups - 1) / groups);
        chosen_.push_back({expert, first, count});
      }
    }
    begins_.push_back(begins[num_experts]);
    choices.resize(begins[num_experts]);
    for (int64_t i = 0; i < size; ++i) {
      if (experts[i] >= 0) {
        places[i] = begins[experts[i]]++;
        choices[places[i]] = i;
      }
    }
  }

  int64_t begin(int64_t group) const {
    return begins_[group];
  }
  int64_t size(int64_t group) const {
    return begins_[group + 1] - begins_[group];
  }

  int64_t height() const {  // rows of the largest group
    return height_;
  }

  // Returns the groups of each expert in blocks of at most `most`.
  std::vector<Block> blocks(int64_t most) const {
    std::vector<Block> found;
    for (const Block& all : chosen_) {
      const int64_t groups = all.end - all.begin, parts = (groups + most - 1) / most;
      for (int64_t part = 0; part < parts; ++part) {
        found.push_back(
            {all.expert, all.begin + part * groups / parts,
             all.begin + (part + 1) * groups / parts});
      }
    }
    return found;
  }

  std::vector<int64_t> choices;  // of each row
  std::vector<int64_t> places;   // the row of each choice, -1 if it has none
  int64_t count = 0;             // groups

 private:
  int64_t height_ = 1;
  std::vector<int64_t> begins_;  // of the groups, and the number of rows
  std::vector<Block> chosen_;    // all groups of each chosen expert
};

}  // namespace
}  // namespace trident

namespace trident {
namespace {

// A `Linear` whose rows have experts.
template <typename T>
struct ExpertLinear {
  const T* x;               // strided by row
  const int64_t* choices;   // of each row; null: they are in order
  const float* scale;
  const void* weight;
  const T* bias;
  T* out;
  int64_t rows, in_features, out_features, x_stride, top_k;

  const T* row(int64_t i) const {
    return x + (choices == nullptr ? i : choices[i] / top_k) * x_stride;
  }
  const T* rows_in_place() const {  // none: the last group may be smaller than others
    return nullptr;
  }
  int64_t panels() const {
    return (out_features + kColumns - 1) / kColumns;
  }
};

// Epilogue: adds the bias of the expert and stores the results of a row and a panel.
template <typename T>
class ExpertPlain {
 public:
  ExpertPlain(const ExpertLinear<T>& a, int64_t expert) : a_(a), expert_(expert) {}

  void operator()(int64_t row, int64_t panel, Vec left, Vec right) const {
    const int64_t column = (panel - expert_ * a_.panels()) * kColumns;
    const T* bias = a_.bias == nullptr ? nullptr : a_.bias + expert_ * a_.out_features;
    store_panel(a_.out + row * a_.out_features, bias, a_.out_features, column, left, right);
  }

 private:
  const ExpertLinear<T>& a_;
  const int64_t expert_;
};

// Epilogue: the first half of a panel are gates, the second half ups.
template <typename T, Activation kind>
class ExpertGated {
 public:
  ExpertGated(const ExpertLinear<T>& a, const ExpertActivation& activation, int64_t expert)
      : a_(a), activation_(activation), expert_(expert) {}

  void operator()(int64_t row, int64_t panel, Vec gate, Vec up) const {
    const int64_t column = (panel - expert_ * a_.panels()) * kColumns;
    if (a_.bias != nullptr) {
      const T* bias = a_.bias + expert_ * a_.out_features + column;
      gate = gate + widen(bias);
      up = up + widen(bias + W);
    }
    const Vec limit(activation_.limit);  // minimum and maximum keep NaN
    gate = at::vec::minimum(gate, limit);
    up = at::vec::maximum(at::vec::minimum(up, limit), limit.neg());
    store(
        a_.out + (row * a_.out_features + column) / 2,
        (up + Vec(activation_.offset)) * activated(gate));
  }

 private:
  Vec activated(Vec gate) const {
    if constexpr (kind == Activation::kSilu) {
      return sigmoid_times<T>(gate, Vec(activation_.alpha) * gate);
    } else {
      return activate<kind, T>(gate);
    }
  }

  const ExpertLinear<T>& a_;
  const ExpertActivation& activation_;
  const int64_t expert_;
};

// Calls multiply(block, panel) of what make(), called once per thread, returns: for all panels of
// the blocks' experts.
void for_panels(
    const auto& a, const std::vector<ExpertOrder::Block>& blocks, const auto& make) {
  const int64_t panels = a.panels();
  share_out(blocks.size() * panels, [&] {
    return [&, multiply = make()](int64_t task) mutable {
      const auto& block = blocks[task / panels];
      const int64_t panel = task % panels;
      multiply(block, block.expert * panels + panel);
    };
  });
}

// finish_of(expert) returns the epilogue.
template <typename Rows>
void multiply_rows(const auto& a, const ExpertOrder& order, const auto& finish_of) {
  const Rows rows(a, order);
  for_panels(a, order.blocks(most_groups(rows)), [&] {
    return [&](const ExpertOrder::Block& block, int64_t panel) {
      const bool is_last = (panel + 1) % a.panels() == 0;
      multiply_block(
          rows, order, block.begin, block.end, a.weight, panel, is_last, finish_of(block.expert));
    };
  });
}

#ifdef TRIDENT_TILES
template <typename Rows>
void multiply_tiles(const auto& a, const ExpertOrder& order, const auto& finish_of) {
  const Rows rows(a, order);
  const TileTasks most(rows, order.count);
  using Finish = decltype(finish_of(0));
  for_panels(a, order.blocks(most.groups), [&] {
    return [&, worker = TileWorker<Rows, StoredPanels, ExpertOrder, Finish>(a, rows, order, most)](
               const ExpertOrder::Block& block, int64_t panel) mutable {
      worker.run(block.begin, block.end, panel, panel + 1, finish_of(block.expert));
    };
  });
}
#endif

template <typename T>
void multiply(const ExpertLinear<T>& a, const ExpertOrder& order, const auto& finish_of) {
#ifdef TRIDENT_TILES
  if (uses_tiles<T>(a.scale)) {
    if (a.scale != nullptr) {
      return multiply_tiles<Int8TileRows>(a, order, finish_of);
    }
    if constexpr (std::is_same_v<T, at::BFloat16>) {
      return multiply_tiles<BFloat16TileRows>(a, order, finish_of);
    }
  }
#endif
  if (a.scale == nullptr) {
    multiply_rows<FloatRows<ProductOf<T>>>(a, order, finish_of);
  } else {
    multiply_rows<Int8Rows>(a, order, finish_of);
  }
}

// Sums the rows of each token's choices, in their order, with their weights.
template <typename T>
void combine(const Experts<T>& a, const ExpertOrder& order, const T* each) {
  at::parallel_for(0, a.tokens, grain(a.top_k * a.hidden), [&](int64_t begin, int64_t end) {
    for (int64_t choice = begin * a.top_k; choice < end * a.top_k; choice += a.top_k) {
      T* out = a.out + choice / a.top_k * a.hidden;
      for (int64_t i = 0; i < a.hidden; i += W) {
        const int64_t n = std::min(W, a.hidden - i);
        Vec sum(0.0f);
        for (int64_t k = choice; k < choice + a.top_k; ++k) {
          if (order.places[k] >= 0) {
            sum = sum + Vec(a.weights[k]) * widen(each + order.places[k] * a.hidden + i, n);
          }
        }
        store(out + i, sum, n);
      }
    }
  });
}

}  // namespace

template <typename T>
void experts(const Experts<T>& a) {
  const int64_t most = uses_tiles<T>(a.gate_up.scale) ? kTileRows : kMostRows;
  const ExpertOrder order(a.experts, a.tokens * a.top_k, a.num_experts, most, a.totals);
  const int64_t rows = order.choices.size();
  const auto inner = std::make_unique_for_overwrite<T[]>(rows * a.size);
  const auto each = std::make_unique_for_overwrite<T[]>(rows * a.hidden);
  if (rows > 0) {
    const ExpertLinear<T> gate_up{
        a.x, order.choices.data(), a.gate_up.scale, a.gate_up.weight, a.gate_up.bias, inner.get(),
        rows, a.hidden, 2 * a.size, a.x_stride, a.top_k};
    for_activation(a.activation.kind, [&](auto kind) {
      multiply(gate_up, order, [&](int64_t expert) {
        return ExpertGated<T, kind()>(gate_up, a.activation, expert);
      });
    });
    const ExpertLinear<T> down{
        inner.get(), nullptr, a.down.scale, a.down.weight, a.down.bias, each.get(), rows, a.size,
        a.hidden, a.size, 1};
    multiply(down, order, [&](int64_t expert) { return ExpertPlain<T>(down, expert); });
  }
  combine(a, order, each.get());
}

#define INSTANTIATE(T) template void experts(const Experts<T>&);
TRIDENT_FOR_EACH_DTYPE(INSTANTIATE)

}  // namespace trident
