// How a strided tensor is walked as rows: leading dimensions are merged where all tensors allow it, and the
// rest is walked in runs of rows that lie a fixed stride apart in each tensor.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

namespace rmsnorm {

inline std::vector<int64_t> contiguous_strides(int64_t dim, const int64_t* sizes) {
    std::vector<int64_t> strides(static_cast<size_t>(dim), 1);
    for (int64_t d = dim - 2; d >= 0; --d) strides[d] = strides[d + 1] * std::max<int64_t>(1, sizes[d + 1]);
    return strides;
}

// Stride and size of the dimensions that have more than one element, by stride.
inline std::vector<std::pair<int64_t, int64_t>> by_stride(int64_t dim, const int64_t* sizes,
                                                          const int64_t* strides) {
    std::vector<std::pair<int64_t, int64_t>> dims;
    for (int64_t d = 0; d < dim; ++d)
        if (sizes[d] != 1) dims.emplace_back(strides[d], sizes[d]);
    std::sort(dims.begin(), dims.end());
    return dims;
}

// No gaps and no overlap: a contiguous tensor, or one with its dimensions permuted.
inline bool dense(int64_t dim, const int64_t* sizes, const int64_t* strides) {
    int64_t expected = 1;
    bool contiguous = true;
    for (int64_t d = dim - 1; d >= 0; --d) {
        contiguous = contiguous && (strides[d] == expected || sizes[d] == 1);
        expected *= sizes[d];
    }
    if (expected == 0) return false;
    if (contiguous) return true;
    expected = 1;
    for (auto [stride, size] : by_stride(dim, sizes, strides)) {
        if (stride != expected) return false;
        expected *= size;
    }
    return true;
}

// Whether two elements may share memory. Layouts whose dimensions interleave count as if they did.
inline bool overlaps_itself(int64_t dim, const int64_t* sizes, const int64_t* strides) {
    if (dense(dim, sizes, strides) || std::count(sizes, sizes + dim, 0)) return false;
    int64_t reach = 0;
    for (auto [stride, size] : by_stride(dim, sizes, strides)) {
        if (stride <= reach) return true;
        reach += (size - 1) * stride;
    }
    return false;
}

// The rows of several tensors of one shape. A caller with fewer of them names fewer.
class Layout {
  public:
    static constexpr int tensors = 5;
    struct Run {
        int64_t first, rows;                          // which rows, in the order of the leading dimensions
        std::array<int64_t, tensors> offset, stride;  // in elements
    };

    Layout(int64_t dim, const int64_t* sizes, std::array<const int64_t*, tensors> strides) {
        for (const int64_t*& t : strides)
            if (!t) t = strides[0];
        for (int64_t d = dim - 2; d >= 0; --d) {
            rows_ *= sizes[d];
            if (sizes[d] == 1) continue;
            std::array<int64_t, tensors> stride;
            for (int t = 0; t < tensors; ++t) stride[t] = strides[t][d];
            if (count_ > 0 && merges(stride)) {
                dims_[count_ - 1].size *= sizes[d];
            } else {
                if (count_ == most) {
                    spill_.push_back({sizes[d], stride});
                    continue;
                }
                dims_[count_++] = {sizes[d], stride};
            }
        }
    }

    int64_t rows() const { return rows_; }

    // Calls `visit(Run)` for the rows [begin, end), in order.
    template <class Visit>
    void for_each_run(int64_t begin, int64_t end, Visit visit) const {
        const int64_t inner = count_ ? dims_[0].size : 1;
        while (begin < end) {
            Run run{begin,
                    std::min(end - begin, inner - begin % inner),
                    {},
                    count_ ? dims_[0].stride : no_stride};
            int64_t index = begin;
            for (int d = 0; d < count_; ++d) advance(run, dims_[d], index);
            for (const Dim& dim : spill_) advance(run, dim, index);
            visit(run);
            begin += run.rows;
        }
    }

  private:
    struct Dim {
        int64_t size;
        std::array<int64_t, tensors> stride;
    };
    static constexpr int most = 6;
    static constexpr std::array<int64_t, tensors> no_stride{};

    bool merges(const std::array<int64_t, tensors>& stride) const {
        if (!spill_.empty()) return false;
        const Dim& last = dims_[count_ - 1];
        for (int t = 0; t < tensors; ++t)
            if (stride[t] != last.stride[t] * last.size) return false;
        return true;
    }

    static void advance(Run& run, const Dim& dim, int64_t& index) {
        const int64_t i = index % dim.size;
        index /= dim.size;
        for (int t = 0; t < tensors; ++t) run.offset[t] += i * dim.stride[t];
    }

    int64_t rows_ = 1;
    int count_ = 0;
    std::array<Dim, most> dims_;  // innermost first
    std::vector<Dim> spill_;      // tensors of many dimensions that do not merge
};

}  // namespace rmsnorm
