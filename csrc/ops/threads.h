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

// work(begin, end, sums, scratch) for runs of rows; it adds their terms of dweight to `sums`. Runs are the
// leaves of a binary tree, whose sums are added in pairs (reference.add_in_pairs), and rounded. Where dweight
// is not wanted there are no sums, the runs are what suits the threads, and there is no result.
template <class Work>
Result sum_rows(int64_t rows, int64_t cols, bool need_dweight, Dtype dtype, int64_t scratch_floats,
                Work work) {
    const rmsnorm::Kernels& kernels = table();
    const int64_t leaves = leaves_of(rows);
    const int64_t threads =
        rows * cols <= elements_per_thread ? 1 : int64_t(torch::stable::get_num_threads());
    // A thread takes whole subtrees: one, or about eight where threads are no power of two.
    int64_t subtrees = 1;
    while (subtrees < leaves && subtrees < 8 * threads && subtrees % threads) subtrees *= 2;
    const int64_t tasks = std::min(threads, subtrees), subtree_leaves = leaves / subtrees;
    int64_t levels = 0;  // of a subtree, above its leaves
    while (int64_t(1) << levels < subtree_leaves) ++levels;

    const int64_t sum_cols = need_dweight ? cols : 0, room = levels * sum_cols + scratch_floats;
    const Tensor buffer = empty_vector(subtrees * sum_cols + tasks * room, ScalarType::Float);
    float* const totals = floats(buffer);
    float* const rooms = totals + subtrees * sum_cols;
    auto first_row = [&](int64_t leaf) { return rows * leaf / leaves; };

    // Sums that wait for their neighbour are a stack, with the subtree's total at the bottom: before leaf i
    // it holds one for each bit of i, and each bit that i + 1 clears is an addition.
    auto sum_subtree = [&](int64_t subtree, float* above, float* scratch) {
        float* const total = totals + subtree * cols;
        auto level = [&](int64_t height) { return height ? above + (height - 1) * cols : total; };
        for (int64_t i = 0; i < subtree_leaves; ++i) {
            int64_t height = 0;
            for (int64_t bits = i; bits; bits &= bits - 1) ++height;
            const int64_t leaf = subtree * subtree_leaves + i;
            std::fill(level(height), level(height) + cols, 0.0f);
            work(first_row(leaf), first_row(leaf + 1), rmsnorm::Vector{level(height), true}, scratch);
            for (int64_t bits = i; bits & 1; bits >>= 1, --height)
                kernels.accumulate(level(height), level(height - 1), cols);
        }
    };
    auto run = [&](int64_t task) {
        const int64_t begin = subtrees * task / tasks, end = subtrees * (task + 1) / tasks;
        float* const above = rooms + task * room;
        float* const scratch = above + levels * sum_cols;
        if (!need_dweight)
            return work(first_row(begin * subtree_leaves), first_row(end * subtree_leaves), rmsnorm::Vector{},
                        scratch);
        for (int64_t subtree = begin; subtree < end; ++subtree) sum_subtree(subtree, above, scratch);
    };
    if (tasks == 1)
        run(0);
    else
        torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
            for (int64_t task = begin; task < end; ++task) run(task);
        });

    if (!need_dweight) return std::nullopt;
    const Tensor dweight = empty_vector(cols, scalar_type(dtype));
    for (int64_t step = 1; step < subtrees; step *= 2)
        for (int64_t subtree = 0; subtree < subtrees; subtree += 2 * step)
            kernels.accumulate(totals + (subtree + step) * cols, totals + subtree * cols, cols);
    kernels.round(totals, dweight.data_ptr(), dtype, cols);
    return dweight;
}

}  // namespace
