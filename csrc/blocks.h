// From rows to threads: shares of the rows, and the blocks of rows whose sums make up dweight.
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

// reference.rows_per_block
inline int64_t rows_per_block(int64_t rows) { return std::max<int64_t>(64, (rows + 255) / 256); }

// work(begin, end, sums, scratch) for every block of rows, which adds its terms of dweight to `sums`. Those
// are added up in the order of the blocks, and rounded. Where dweight is not wanted, `sums` is null and the
// result empty.
template <class Work>
Tensor sum_blocks(int64_t rows, int64_t cols, bool need_dweight, Dtype dtype, int64_t scratch_floats,
                  Work work) {
    const rmsnorm::Kernels& kernels = table();
    const int64_t length = rows_per_block(rows), blocks = (rows + length - 1) / length;
    const int64_t threads =
        rows * cols <= elements_per_thread ? 1 : int64_t(torch::stable::get_num_threads());
    const int64_t tasks = std::max<int64_t>(1, std::min(threads, blocks));
    auto first_block = [&](int64_t task) { return blocks * task / tasks; };
    // The first task adds its block sums up as it goes; those of the others wait, so that all are added in
    // order.
    const int64_t waiting = need_dweight ? blocks - first_block(1) : 0, sum_cols = need_dweight ? cols : 0;
    const Tensor buffer = empty_vector((2 + waiting) * sum_cols + tasks * scratch_floats, ScalarType::Float);
    float* const total = floats(buffer);
    float* const first_sum = total + sum_cols;
    float* const waiting_sums = first_sum + sum_cols;
    float* const scratch = waiting_sums + waiting * sum_cols;
    std::fill(total, total + sum_cols, 0.0f);

    auto run = [&](int64_t task) {
        for (int64_t block = first_block(task); block < first_block(task + 1); ++block) {
            float* sums = nullptr;
            if (need_dweight) {
                sums = task == 0 ? first_sum : waiting_sums + (block - first_block(1)) * cols;
                std::fill(sums, sums + cols, 0.0f);
            }
            work(block * length, std::min(rows, (block + 1) * length), sums, scratch + task * scratch_floats);
            if (need_dweight && task == 0) kernels.accumulate(sums, total, cols);
        }
    };
    if (tasks == 1)
        run(0);
    else
        torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
            for (int64_t task = begin; task < end; ++task) run(task);
        });
    for (int64_t block = 0; block < waiting; ++block)
        kernels.accumulate(waiting_sums + block * cols, total, cols);

    const Tensor dweight = empty_vector(sum_cols, scalar_type(dtype));
    if (need_dweight) kernels.round(total, dweight.data_ptr(), dtype, cols);
    return dweight;
}

}  // namespace
