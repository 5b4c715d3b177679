// The choices of experts, ordered by expert. For experts.cpp alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

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
