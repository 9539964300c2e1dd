// The operators: from tensors to rows, and rows to threads. This file and tensors.h alone see PyTorch, and
// only through LibTorch's Stable ABI, so that one build serves every release from 2.10.
//
// The checks here guard memory; the messages a user sees come from functional.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "tensors.h"

namespace {

// Below this many elements a second thread costs more than it saves.
constexpr int64_t elements_per_thread = 16384;
// Input and output that together exceed this are taken to exceed the last cache. It is the share of one core
// complex of a current server; what the system reports was seen to be ten times the truth in a virtual
// machine.
constexpr int64_t cache_bytes = int64_t(32) << 20;

enum Rounding : int64_t { once = 0, before_scale = 1, weight_dtype = 2 };  // reference.ROUNDINGS

// reference.result_dtype
Dtype result_dtype(Dtype x, const std::optional<View>& weight, int64_t rounding) {
    STD_TORCH_CHECK(rounding >= once && rounding <= weight_dtype, "unknown rounding");
    if (!weight || rounding == once) return x;
    return rounding == weight_dtype || weight->dtype == x ? weight->dtype : Dtype::f32;
}

// What x_hat is rounded to before the gain.
Dtype x_hat_dtype(Dtype x, const std::optional<View>& weight, int64_t rounding) {
    if (rounding == before_scale) return x;
    return rounding == weight_dtype && weight ? weight->dtype : Dtype::f32;
}

// Whether y is written past the cache: it would not stay there anyway, and its old contents need not be read.
// Its rows must begin and end at cache lines.
bool past_the_cache(const View& x, const View& y) {
    if (x.bytes() + y.bytes() <= cache_bytes || x.data == y.data) return false;
    const int64_t size = rmsnorm::size_of(y.dtype);
    bool aligned = reinterpret_cast<uintptr_t>(y.data) % 64 == 0 && y.cols() * size % 64 == 0;
    for (int64_t d = 0; d < y.dim - 1; ++d) aligned = aligned && y.strides[d] * size % 64 == 0;
    return aligned;
}

struct Options {
    double eps, weight_offset;
    int64_t rounding;
};

// y = norm(x), or h = x + residual and y = norm(h); rstd where wanted.
void normalize(const View& x, const View* residual, const std::optional<View>& weight, const Options& options,
               const View& y, const View* h, float* rstd) {
    STD_TORCH_CHECK(std::isfinite(options.eps) && std::isfinite(options.weight_offset),
                    "eps and weight_offset must be finite");
    const Gain gain(weight, options.weight_offset, x.cols(), y.dtype);
    const rmsnorm::Kernels& kernels = table();
    const Layout layout(x.dim, x.sizes,
                        {x.strides, y.strides, (residual ? *residual : x).strides, (h ? *h : x).strides});

    rmsnorm::Forward call{};
    call.gain = gain.get();
    call.cols = x.cols();
    call.eps = options.eps;
    call.x_type = x.dtype;
    call.y_type = y.dtype;
    call.x_hat_type = x_hat_dtype(x.dtype, weight, options.rounding);
    call.stream = past_the_cache(x, y);
    auto task = [&](int64_t begin, int64_t end) {
        layout.for_each_run(begin, end, [&](const Layout::Run& run) {
            rmsnorm::Forward part = call;
            part.rows = run.rows;
            part.x = x.rows(run, 0);
            part.y = y.rows(run, 1);
            if (h) {
                part.residual = residual->rows(run, 2);
                part.h = h->rows(run, 3);
            }
            part.rstd = rstd ? rstd + run.first : nullptr;
            kernels.forward(part);
        });
    };
    if (layout.rows() * x.cols() <= elements_per_thread)
        task(0, layout.rows());
    else
        torch::stable::parallel_for(0, layout.rows(), std::max<int64_t>(1, elements_per_thread / x.cols()),
                                    task);
}

float* floats(const Tensor& t) { return static_cast<float*>(t.data_ptr()); }

Tensor forward(const Tensor& x_given, const std::optional<Tensor>& weight_given, double eps,
               double weight_offset, int64_t rounding) {
    const View x(x_given);
    const std::optional<View> weight = view(weight_given);
    const View y = empty_like(x, result_dtype(x.dtype, weight, rounding));
    normalize(x, nullptr, weight, {eps, weight_offset, rounding}, y, nullptr, nullptr);
    return y.tensor;
}

std::tuple<Tensor, Tensor> forward_train(const Tensor& x_given, const std::optional<Tensor>& weight_given,
                                         double eps, double weight_offset, int64_t rounding) {
    const View x(x_given);
    const std::optional<View> weight = view(weight_given);
    const View y = empty_like(x, result_dtype(x.dtype, weight, rounding));
    const Tensor rstd = empty_rstd(x);
    normalize(x, nullptr, weight, {eps, weight_offset, rounding}, y, nullptr, floats(rstd));
    return {y.tensor, rstd};
}

// Refuses what functional.py may still allow: an `out` not known to be x itself or apart from all that is
// read.
void forward_out(const Tensor& x_given, const std::optional<Tensor>& weight_given, double eps,
                 const Tensor& out, double weight_offset, int64_t rounding) {
    const View x(x_given), y(out);
    const std::optional<View> weight = view(weight_given);
    STD_TORCH_CHECK(y.shaped_as(x) && y.dtype == result_dtype(x.dtype, weight, rounding),
                    "out must have x's shape and the result's dtype");
    STD_TORCH_CHECK(!x.copied && !y.copied && !(weight && weight->copied), "expected adjacent columns");
    STD_TORCH_CHECK(!rmsnorm::overlaps_itself(y.dim, y.sizes, y.strides), "out must not overlap itself");
    STD_TORCH_CHECK(y.lies_as(x) || y.apart_from(x), "out must be x itself or lie apart from it");
    STD_TORCH_CHECK(!weight || y.apart_from(*weight), "out must lie apart from weight");
    normalize(x, nullptr, weight, {eps, weight_offset, rounding}, y, nullptr, nullptr);
}

std::tuple<Tensor, Tensor, Tensor> add_forward(const Tensor& x_given, const Tensor& residual_given,
                                               const std::optional<Tensor>& weight_given, double eps,
                                               double weight_offset, int64_t rounding) {
    const View x(x_given), residual(residual_given);
    const std::optional<View> weight = view(weight_given);
    STD_TORCH_CHECK(residual.shaped_as(x) && residual.dtype == x.dtype,
                    "residual must have x's shape and dtype");
    const View y = empty_like(x, result_dtype(x.dtype, weight, rounding)), h = empty_like(x, x.dtype);
    const Tensor rstd = empty_rstd(x);
    normalize(x, &residual, weight, {eps, weight_offset, rounding}, y, &h, floats(rstd));
    return {y.tensor, h.tensor, rstd};
}

// reference.rows_per_block
int64_t rows_per_block(int64_t rows) { return std::max<int64_t>(64, (rows + 255) / 256); }

// With `rebuilt_dtype`, x is y, and x in that dtype is rebuilt from it.
std::tuple<Tensor, Tensor> backward(const Tensor& dy_given, const Tensor& x_given, const Tensor& rstd_given,
                                    const std::optional<Tensor>& weight_given, double weight_offset,
                                    const std::optional<Tensor>& dh_given,
                                    std::optional<ScalarType> rebuilt_dtype, bool need_dx,
                                    bool need_dweight) {
    const View dy(dy_given), x(x_given);
    const std::optional<View> weight = view(weight_given), dh = view(dh_given);
    const bool from_y = rebuilt_dtype.has_value();
    const Dtype x_type = from_y ? dtype_of(*rebuilt_dtype) : x.dtype;
    STD_TORCH_CHECK(dy.shaped_as(x), "dy must have x's shape");
    STD_TORCH_CHECK(!dh || (dh->shaped_as(x) && dh->dtype == x_type), "dh must have x's shape and dtype");

    // When x is to be rebuilt from y it is rebuilt in dx, which the kernel may write over.
    std::optional<View> dx;
    if (need_dx || from_y) dx = empty_like(x, x_type);
    const Layout layout(x.dim, x.sizes,
                        {dy.strides, x.strides, (dh ? *dh : x).strides, (dx ? *dx : x).strides});
    const int64_t rows = layout.rows(), cols = x.cols();
    const Tensor rstd = torch::stable::contiguous(rstd_given);
    STD_TORCH_CHECK(rstd.scalar_type() == ScalarType::Float && rstd.is_cpu() && rstd.numel() == rows,
                    "rstd must have one float32 per row");
    const Gain gain(weight, weight_offset, cols, x_type);
    const rmsnorm::Kernels& kernels = table();

    const int64_t length = rows_per_block(rows), blocks = (rows + length - 1) / length;
    const int64_t threads =
        rows * cols <= elements_per_thread ? 1 : int64_t(torch::stable::get_num_threads());
    const int64_t tasks = std::max<int64_t>(1, std::min(threads, blocks));
    auto first_block = [&](int64_t task) { return blocks * task / tasks; };
    // The first task adds its block sums up as it goes; those of the others wait, so that all are added in
    // order.
    const int64_t waiting = need_dweight ? blocks - first_block(1) : 0;
    const int64_t sum_cols = need_dweight ? cols : 0, scratch_floats = need_dx ? cols : 0;
    const Tensor buffer = empty_vector((2 + waiting) * sum_cols + tasks * scratch_floats, ScalarType::Float);
    float* const total = floats(buffer);
    float* const first_sum = total + sum_cols;
    float* const waiting_sums = first_sum + sum_cols;
    float* const scratch = waiting_sums + waiting * sum_cols;
    std::fill(total, total + sum_cols, 0.0f);

    rmsnorm::Backward call{};
    call.gain = gain.get();
    call.cols = cols;
    call.dy_type = dy.dtype;
    call.x_type = x_type;
    auto work = [&](int64_t task) {
        for (int64_t block = first_block(task); block < first_block(task + 1); ++block) {
            float* sum = nullptr;
            if (need_dweight) {
                sum = task == 0 ? first_sum : waiting_sums + (block - first_block(1)) * cols;
                std::fill(sum, sum + cols, 0.0f);
            }
            layout.for_each_run(
                block * length, std::min(rows, (block + 1) * length), [&](const Layout::Run& run) {
                    rmsnorm::Backward part = call;
                    part.rows = run.rows;
                    part.rstd = floats(rstd) + run.first;
                    part.dy = dy.rows(run, 0);
                    part.x = x.rows(run, 1);
                    if (from_y) {
                        const Rows rebuilt = dx->rows(run, 3);
                        kernels.rebuild(
                            {part.x, rebuilt, part.rstd, call.gain, run.rows, cols, x.dtype, x_type});
                        part.x = rebuilt;
                    }
                    if (dh) part.dh = dh->rows(run, 2);
                    if (need_dx) part.dx = dx->rows(run, 3);
                    part.dweight = sum;
                    part.scratch = scratch + task * scratch_floats;
                    kernels.backward(part);
                });
            if (need_dweight && task == 0) kernels.accumulate(sum, total, cols);
        }
    };
    if (tasks == 1)
        work(0);
    else
        torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
            for (int64_t task = begin; task < end; ++task) work(task);
        });
    for (int64_t block = 0; block < waiting; ++block)
        kernels.accumulate(waiting_sums + block * cols, total, cols);

    const Tensor dweight = empty_vector(sum_cols, weight ? scalar_type(weight->dtype) : ScalarType::Float);
    if (need_dweight) kernels.round(total, dweight.data_ptr(), weight ? weight->dtype : Dtype::f32, cols);
    return {need_dx ? dx->tensor : empty_vector(0, scalar_type(x_type)), dweight};
}

std::string isa() { return table().name; }
std::string isas() { return rmsnorm::available(); }

}  // namespace

STABLE_TORCH_LIBRARY(rmsnorm, m) {
#define NORM "Tensor? weight, float eps, float weight_offset=0.0, int rounding=0"
    m.def("forward(Tensor x, " NORM ") -> Tensor");
    m.def("forward_train(Tensor x, " NORM ") -> (Tensor y, Tensor rstd)");
    m.def(
        "forward_out(Tensor x, Tensor? weight, float eps, Tensor(a!) out, float weight_offset=0.0, int "
        "rounding=0) "
        "-> ()");
    m.def("add_forward(Tensor x, Tensor residual, " NORM ") -> (Tensor y, Tensor h, Tensor rstd)");
    m.def(
        "backward(Tensor dy, Tensor x, Tensor rstd, Tensor? weight, float weight_offset, Tensor? dh, "
        "ScalarType? rebuilt_dtype, bool need_dx, bool need_dweight) -> (Tensor dx, Tensor dweight)");
#undef NORM
    m.def("isa() -> str");
    m.def("isas() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(rmsnorm, CPU, m) {
    m.impl("forward", TORCH_BOX(&forward));
    m.impl("forward_train", TORCH_BOX(&forward_train));
    m.impl("forward_out", TORCH_BOX(&forward_out));
    m.impl("add_forward", TORCH_BOX(&add_forward));
    m.impl("backward", TORCH_BOX(&backward));
}

STABLE_TORCH_LIBRARY_IMPL(rmsnorm, CompositeExplicitAutograd, m) {
    m.impl("isa", TORCH_BOX(&isa));
    m.impl("isas", TORCH_BOX(&isas));
}
