// From rows to threads: shares of the rows, and the sum over rows that is dweight.
#pragma once

#include "tensors.h"

namespace {

// Below this many elements a second thread costs more than it saves.
constexpr int64_t elements_per_thread = 16384;

// task(begin, end) for shares of the rows.
template <class Task>
void for_rows(int64_t rows, int64_t cols, Task task) {
    if (rows * cols <= elements_per_thread)
        task(0, rows);
    else
        torch::stable::parallel_for(0, rows, std::max<int64_t>(1, elements_per_thread / cols), task);
}

// reference.leaves
inline int64_t leaves_of(int64_t rows) {
    int64_t leaves = 1;
    while (leaves * 64 < rows) leaves *= 2;
    return leaves;
}

// Float32 sums over segments of `rows` rows each: (segments, width), each total `stride` floats after the one
// before.
struct Sums {
    Tensor buffer;
    int64_t stride;
    const float* total(int64_t segment) const { return floats(buffer) + segment * stride; }
};

// work(begin, end, sums, scratch) for runs of rows; it adds `width` terms of each row to `sums`. Runs are the
// leaves of a binary tree for each segment, whose sums are added in pairs (fixed_sum.add_in_pairs). With a
// width of 0 there are no sums, and the runs are what suits the threads. `cols` says what a row costs.
template <class Work>
Sums sum_segments(int64_t segments, int64_t rows, int64_t cols, int64_t width, int64_t scratch_floats,
                  Work work) {
    const rmsnorm::Kernels& kernels = table();
    const int64_t leaves = leaves_of(rows);
    const int64_t threads =
        segments * rows * cols <= elements_per_thread ? 1 : int64_t(torch::stable::get_num_threads());
    // A thread takes whole subtrees: one, or about eight where threads are no power of two.
    int64_t subtrees = 1;
    while (subtrees < leaves && segments * subtrees < 8 * threads && segments * subtrees % threads)
        subtrees *= 2;
    const int64_t units = segments * subtrees, tasks = std::min(threads, units);
    const int64_t subtree_leaves = leaves / subtrees;
    int64_t levels = 0;  // of a subtree, above its leaves
    while (int64_t(1) << levels < subtree_leaves) ++levels;

    const int64_t room = levels * width + scratch_floats;
    const Tensor buffer = empty_vector(units * width + tasks * room, ScalarType::Float);
    float* const totals = floats(buffer);
    float* const rooms = totals + units * width;
    // The first row of a subtree's leaf, which may be the next subtree's first.
    auto first_row = [&](int64_t unit, int64_t leaf) {
        return unit / subtrees * rows + rows * (unit % subtrees * subtree_leaves + leaf) / leaves;
    };

    // Sums that wait for their neighbour are a stack, with the subtree's total at the bottom: before leaf i
    // it holds one for each bit of i, and each bit that i + 1 clears is an addition.
    auto sum_subtree = [&](int64_t unit, float* above, float* scratch) {
        float* const total = totals + unit * width;
        auto level = [&](int64_t height) { return height ? above + (height - 1) * width : total; };
        for (int64_t i = 0; i < subtree_leaves; ++i) {
            int64_t height = 0;
            for (int64_t bits = i; bits; bits &= bits - 1) ++height;
            std::fill(level(height), level(height) + width, 0.0f);
            work(first_row(unit, i), first_row(unit, i + 1), level(height), scratch);
            for (int64_t bits = i; bits & 1; bits >>= 1, --height)
                kernels.accumulate(level(height), level(height - 1), width);
        }
    };
    auto run = [&](int64_t task) {
        const int64_t begin = units * task / tasks, end = units * (task + 1) / tasks;
        float* const above = rooms + task * room;
        float* const scratch = above + levels * width;
        if (!width) return work(first_row(begin, 0), first_row(end, 0), nullptr, scratch);
        for (int64_t unit = begin; unit < end; ++unit) sum_subtree(unit, above, scratch);
    };
    if (tasks == 1)
        run(0);
    else if (tasks)
        torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
            for (int64_t task = begin; task < end; ++task) run(task);
        });

    for (int64_t segment = 0; width && segment < segments; ++segment)
        for (int64_t step = 1; step < subtrees; step *= 2)
            for (int64_t subtree = segment * subtrees; subtree < (segment + 1) * subtrees;
                 subtree += 2 * step)
                kernels.accumulate(totals + (subtree + step) * width, totals + subtree * width, width);
    return {buffer, subtrees * width};
}

// The same of all rows as one segment; the sums, one a column, come rounded to `dtype` where they are wanted.
template <class Work>
Result sum_rows(int64_t rows, int64_t cols, bool need_dweight, Dtype dtype, int64_t scratch_floats,
                Work work) {
    const Sums sums = sum_segments(1, rows, cols, need_dweight ? cols : 0, scratch_floats,
                                   [&](int64_t begin, int64_t end, float* dweight, float* scratch) {
                                       work(begin, end, rmsnorm::Vector{dweight, need_dweight}, scratch);
                                   });
    if (!need_dweight) return std::nullopt;
    const Tensor dweight = empty_vector(cols, scalar_type(dtype));
    table().round(sums.total(0), dweight.data_ptr(), dtype, cols);
    return dweight;
}

}  // namespace
