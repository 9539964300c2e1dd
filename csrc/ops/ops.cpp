// The plain operators: from tensors to rows.
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
#include "threads.h"

namespace {

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
    for_rows(layout.rows(), x.cols(), task);
}

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

void forward_out(const Tensor& x_given, const std::optional<Tensor>& weight_given, double eps,
                 const Tensor& out, double weight_offset, int64_t rounding) {
    const View x(x_given), y(out);
    const std::optional<View> weight = view(weight_given);
    check_out(y, result_dtype(x.dtype, weight, rounding), x, {&weight});
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

// With `rebuilt_dtype`, x is y, and x in that dtype is rebuilt from it.
std::tuple<Result, Result> backward(const Tensor& dy_given, const Tensor& x_given, const Tensor& rstd_given,
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

    rmsnorm::Backward call{};
    call.gain = gain.get();
    call.cols = cols;
    call.dy_type = dy.dtype;
    call.x_type = x_type;
    const int64_t scratch = need_dx ? cols : 0;
    const Dtype dweight_type = weight ? weight->dtype : Dtype::f32;
    const Result dweight = sum_rows(
        rows, cols, need_dweight, dweight_type, scratch,
        [&](int64_t begin, int64_t end, float* sums, float* room) {
            layout.for_each_run(begin, end, [&](const Layout::Run& run) {
                rmsnorm::Backward part = call;
                part.rows = run.rows;
                part.rstd = floats(rstd) + run.first;
                part.dy = dy.rows(run, 0);
                part.x = x.rows(run, 1);
                if (from_y) {
                    const Rows rebuilt = dx->rows(run, 3);
                    kernels.rebuild({part.x, rebuilt, part.rstd, call.gain, run.rows, cols, x.dtype, x_type});
                    part.x = rebuilt;
                }
                if (dh) part.dh = dh->rows(run, 2);
                if (need_dx) part.dx = dx->rows(run, 3);
                part.dweight = sums;
                part.scratch = room;
                kernels.backward(part);
            });
        });
    return {need_dx ? tensor_of(dx) : std::nullopt, dweight};
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
        "ScalarType? rebuilt_dtype, bool need_dx, bool need_dweight) -> (Tensor? dx, Tensor? dweight)");
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
