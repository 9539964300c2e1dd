// The operators with a gate, with groups of the row, or both: from tensors to rows.
//
// The checks here guard memory; the messages a user sees come from gating.py.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>

#include "tensors.h"
#include "threads.h"

namespace {

using rmsnorm::Activation;

// x, its gate, and how the two go together.
struct Gating {
    const View x;
    const std::optional<View> gate;
    int64_t cols, groups;  // cols: of a group
    rmsnorm::Gate call{};

    Gating(const Tensor& x_given, const std::optional<Tensor>& gate_given, int64_t group_size,
           int64_t activation, bool gate_first)
        : x(x_given), gate(view(gate_given)), cols(group_size ? group_size : x.cols()) {
        STD_TORCH_CHECK(cols > 0 && x.cols() % cols == 0, "group_size must divide the columns");
        STD_TORCH_CHECK(activation == 0 || activation == 1, "unknown activation");
        STD_TORCH_CHECK(!gate || (gate->shaped_as(x) && gate->dtype == x.dtype),
                        "gate must have x's shape and dtype");
        groups = x.cols() / cols;
        call.activation = static_cast<Activation>(activation);
        call.first = gate_first;
    }

    bool gate_last() const { return gate && !call.first; }
    int64_t scratch() const { return gate ? rmsnorm::gate_scratch(x.cols()) : 0; }
    const View& gate_or_x() const { return gate ? *gate : x; }
};

// y, in `out` where that is given, and rstd where wanted.
Tensor normalize(const Gating& g, const std::optional<Tensor>& weight_given, double eps, double weight_offset,
                 int64_t rounding, float* rstd, const std::optional<Tensor>& out = std::nullopt) {
    STD_TORCH_CHECK(std::isfinite(eps) && std::isfinite(weight_offset),
                    "eps and weight_offset must be finite");
    const View& x = g.x;
    const std::optional<View> weight = view(weight_given);
    const Dtype normed_type = result_dtype(x.dtype, weight, rounding);
    const Dtype y_type = g.gate_last() ? x.dtype : normed_type;
    if (out) check_out(View(*out), y_type, x, {&g.gate, &weight});
    const View y = out ? View(*out) : empty_like(x, y_type);
    const Gain gain(weight, weight_offset, x.cols(), y.dtype);
    const rmsnorm::Kernels& kernels = table();
    const Layout layout(x.dim, x.sizes, {x.strides, y.strides, g.gate_or_x().strides, x.strides});

    rmsnorm::GatedForward call{};
    call.gate = g.call;
    call.normed_type = rounding == once ? Dtype::f32 : normed_type;
    call.norm.gain = gain.get();
    call.norm.cols = g.cols;
    call.norm.groups = g.groups;
    call.norm.eps = eps;
    call.norm.x_type = x.dtype;
    call.norm.y_type = y.dtype;
    call.norm.x_hat_type = x_hat_dtype(x.dtype, weight, rounding);
    call.norm.stream = past_the_cache(x, y) && g.cols * rmsnorm::size_of(y.dtype) % 64 == 0;
    for_rows(layout.rows(), x.cols(), [&](int64_t begin, int64_t end) {
        const Floats scratch(g.scratch());
        layout.for_each_run(begin, end, [&](const Layout::Run& run) {
            rmsnorm::GatedForward part = call;
            part.norm.rows = run.rows;
            part.norm.x = x.rows(run, 0);
            part.norm.y = y.rows(run, 1);
            part.norm.rstd = rstd ? rstd + run.first * g.groups : nullptr;
            if (!g.gate) return kernels.forward(part.norm);
            part.gate.rows = g.gate->rows(run, 2);
            part.gate.scratch = scratch.get();
            kernels.gated_forward(part);
        });
    });
    return y.tensor;
}

Tensor gated_forward(const Tensor& x, const std::optional<Tensor>& gate, const std::optional<Tensor>& weight,
                     double eps, double weight_offset, int64_t rounding, int64_t group_size,
                     int64_t activation, bool gate_first) {
    return normalize({x, gate, group_size, activation, gate_first}, weight, eps, weight_offset, rounding,
                     nullptr);
}

std::tuple<Tensor, Tensor> gated_forward_train(const Tensor& x, const std::optional<Tensor>& gate,
                                               const std::optional<Tensor>& weight, double eps,
                                               double weight_offset, int64_t rounding, int64_t group_size,
                                               int64_t activation, bool gate_first) {
    const Gating g(x, gate, group_size, activation, gate_first);
    const Tensor rstd = empty_rstd(g.x, g.groups);
    return {normalize(g, weight, eps, weight_offset, rounding, floats(rstd)), rstd};
}

void gated_forward_out(const Tensor& x, const std::optional<Tensor>& gate,
                       const std::optional<Tensor>& weight, double eps, double weight_offset,
                       int64_t rounding, int64_t group_size, int64_t activation, bool gate_first,
                       const Tensor& out) {
    normalize({x, gate, group_size, activation, gate_first}, weight, eps, weight_offset, rounding, nullptr,
              out);
}

std::tuple<Result, Result, Result> gated_backward(const Tensor& dy_given, const Tensor& x_given,
                                                  const std::optional<Tensor>& gate_given,
                                                  const Tensor& rstd_given,
                                                  const std::optional<Tensor>& weight_given,
                                                  const std::optional<Tensor>& dh_given, double weight_offset,
                                                  int64_t group_size, int64_t activation, bool gate_first,
                                                  bool need_dx, bool need_dgate, bool need_dweight) {
    const Gating g(x_given, gate_given, group_size, activation, gate_first);
    const View &x = g.x, dy(dy_given);
    const std::optional<View> weight = view(weight_given), dh = view(dh_given);
    STD_TORCH_CHECK(dy.shaped_as(x), "dy must have x's shape");
    STD_TORCH_CHECK(!dh || (dh->shaped_as(x) && dh->dtype == x.dtype && !g.gate),
                    "dh must have x's shape and dtype, and there is none with a gate");
    STD_TORCH_CHECK(!g.gate_last() || dy.dtype == x.dtype, "dy must have x's dtype");
    STD_TORCH_CHECK(g.gate || !need_dgate, "there is no gate to have a gradient");

    std::optional<View> dx, dgate;
    if (need_dx) dx = empty_like(x, x.dtype);
    if (need_dgate) dgate = empty_like(x, x.dtype);
    const Layout layout(x.dim, x.sizes,
                        {dy.strides, x.strides, (dh ? *dh : g.gate_or_x()).strides,
                         (dx      ? *dx
                          : dgate ? *dgate
                                  : x)
                             .strides});
    const int64_t rows = layout.rows(), cols = x.cols();
    const Tensor rstd = torch::stable::contiguous(rstd_given);
    STD_TORCH_CHECK(
        rstd.scalar_type() == ScalarType::Float && rstd.is_cpu() && rstd.numel() == rows * g.groups,
        "rstd must have one float32 per group");
    const Gain gain(weight, weight_offset, cols, x.dtype);
    const rmsnorm::Kernels& kernels = table();

    rmsnorm::GatedBackward call{};
    call.gate = g.call;
    call.norm.gain = gain.get();
    call.norm.cols = g.cols;
    call.norm.groups = g.groups;
    call.norm.dy_type = dy.dtype;
    call.norm.x_type = x.dtype;
    const int64_t norm_scratch = g.cols;
    const Dtype dweight_type = weight ? weight->dtype : Dtype::f32;
    const Result dweight = sum_rows(rows, cols, need_dweight, dweight_type, norm_scratch + g.scratch(),
                                    [&](int64_t begin, int64_t end, float* sums, float* scratch) {
                                        layout.for_each_run(begin, end, [&](const Layout::Run& run) {
                                            rmsnorm::GatedBackward part = call;
                                            part.norm.rows = run.rows;
                                            part.norm.rstd = floats(rstd) + run.first * g.groups;
                                            part.norm.dy = dy.rows(run, 0);
                                            part.norm.x = x.rows(run, 1);
                                            if (dx) part.norm.dx = dx->rows(run, 3);
                                            if (dh) part.norm.dh = dh->rows(run, 2);
                                            part.norm.dweight = sums;
                                            part.norm.scratch = scratch;
                                            if (!g.gate) return kernels.backward(part.norm);
                                            part.gate.rows = g.gate->rows(run, 2);
                                            part.gate.scratch = scratch + norm_scratch;
                                            if (dgate) part.dgate = dgate->rows(run, 3);
                                            kernels.gated_backward(part);
                                        });
                                    });
    return {tensor_of(dx), tensor_of(dgate), dweight};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rmsnorm, m) {
#define GROUPS "int group_size, int activation, bool gate_first"
#define NORM "Tensor x, Tensor? gate, Tensor? weight, float eps, float weight_offset, int rounding, " GROUPS
    m.def("gated_forward(" NORM ") -> Tensor");
    m.def("gated_forward_train(" NORM ") -> (Tensor y, Tensor rstd)");
    m.def("gated_forward_out(" NORM ", Tensor(a!) out) -> ()");
    m.def(
        "residual_forward(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset, "
        "int rounding, int group_size, bool exact_sum, float alpha) -> (Tensor y, Tensor h, Tensor rstd)");
    m.def(
        "gated_backward(Tensor dy, Tensor x, Tensor? gate, Tensor rstd, Tensor? weight, Tensor? dh, float "
        "weight_offset, " GROUPS
        ", bool need_dx, bool need_dgate, bool need_dweight) -> (Tensor? dx, Tensor? dgate, Tensor? "
        "dweight)");
#undef NORM
#undef GROUPS
}

STABLE_TORCH_LIBRARY_IMPL(rmsnorm, CPU, m) {
    m.impl("gated_forward", TORCH_BOX(&gated_forward));
    m.impl("gated_forward_train", TORCH_BOX(&gated_forward_train));
    m.impl("gated_forward_out", TORCH_BOX(&gated_forward_out));
    m.impl("gated_backward", TORCH_BOX(&gated_backward));
}
