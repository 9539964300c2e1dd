// The backward of every operator: from tensors and options to the kernels' rows.
#pragma once

#include "normalize.h"

namespace {

// What goes into a backward. With `rebuilt_dtype`, x is y, and x in that dtype is rebuilt from it.
struct Derivative {
    View dy, x;
    std::optional<View> gate, weight, dh;
    Tensor rstd;
    Spec spec;
    bool need_dx, need_dgate, need_dweight;
    std::optional<ScalarType> rebuilt_dtype;

    Dtype x_type() const { return rebuilt_dtype ? dtype_of(*rebuilt_dtype) : x.dtype; }
    int64_t group_cols() const { return spec.group_size ? spec.group_size : x.cols(); }

    void check() const {
        Norm::check_groups(x, spec);
        STD_TORCH_CHECK(dy.shaped_as(x), "dy must have x's shape");
        STD_TORCH_CHECK(!gate || gate->shaped_as(x), "gate must have x's shape");
        STD_TORCH_CHECK(!gate || spec.gate_first || dy.dtype == x.dtype, "dy must have x's dtype");
        STD_TORCH_CHECK(gate || !need_dgate, "there is no gate to have a gradient");
        STD_TORCH_CHECK(!dh || (!gate && dh->shaped_as(x) && dh->dtype == x_type()),
                        "dh must have x's shape and dtype, and there is none with a gate");
    }
};

// rstd, its values side by side.
inline Tensor values_of_groups(const Tensor& rstd, int64_t groups) {
    STD_TORCH_CHECK(rstd.is_cpu() && rstd.scalar_type() == ScalarType::Float && rstd.numel() == groups,
                    "rstd must have one float32 per row, or per group");
    if (!rstd.is_contiguous()) return View(rstd, "rstd").contiguous();
    check_storage(rstd, groups, sizeof(float), "rstd");
    return rstd;
}

struct Gradients {
    Result dx, dgate, dweight;
};

inline Gradients differentiate(const Derivative& given) {
    given.check();
    const View &dy = given.dy, &x = given.x;
    const bool rebuilds = given.rebuilt_dtype.has_value();
    const Dtype x_type = given.x_type();
    const int64_t cols = x.cols(), group_cols = given.group_cols(), groups = cols / group_cols;

    // When x is to be rebuilt from y it is rebuilt in dx, which the kernel may write over.
    std::optional<View> dx, dgate;
    if (given.need_dx || rebuilds) dx = empty_like(x, x_type);
    if (given.need_dgate) dgate = empty_like(x, given.gate->dtype);
    const View& second = given.gate ? *given.gate : given.dh ? *given.dh : x;
    const View& result = dx ? *dx : dgate ? *dgate : x;  // dx and dgate lie alike
    const Layout layout(x.dim, x.sizes, {dy.strides, x.strides, second.strides, result.strides});
    const int64_t rows = layout.rows();
    const Tensor rstd = values_of_groups(given.rstd, rows * groups);
    const Gain gain(given.weight, given.spec.weight_offset, cols, x_type);
    const rmsnorm::Kernels& kernels = table();

    rmsnorm::Backward call{};
    call.gate.given = given.gate.has_value();
    call.gain = gain.vector();
    call.cols = group_cols;
    call.groups = groups;
    call.gate_first = given.spec.gate_first;
    call.activation = static_cast<Activation>(given.spec.activation);
    const Dtype dweight_type = given.weight ? given.weight->dtype : Dtype::f32;
    auto work = [&](int64_t begin, int64_t end, rmsnorm::Vector dweight, float* scratch) {
        layout.for_each_run(begin, end, [&](const Layout::Run& run) {
            rmsnorm::Backward part = call;
            part.rows = run.rows;
            part.rstd = {floats(rstd) + run.first * groups, true};
            part.dy = dy.rows(run, 0);
            part.x = x.rows(run, 1);
            if (rebuilds) {
                const Rows rebuilt = dx->rows(run, 3);
                kernels.rebuild({part.x, rebuilt, part.rstd, call.gain, run.rows, cols});
                part.x = rebuilt;
            }
            if (given.gate) part.gate = second.rows(run, 2);
            if (given.dh) part.dh = second.rows(run, 2);
            if (given.need_dx) part.dx = dx->rows(run, 3);
            if (dgate) part.dgate = dgate->rows(run, 3);
            part.dweight = dweight;
            part.scratch = scratch;
            kernels.backward(part);
        });
    };
    const Result dweight =
        sum_rows(rows, cols, given.need_dweight, dweight_type, rmsnorm::backward_scratch(call), work);
    return {given.need_dx ? tensor_of(dx) : std::nullopt, tensor_of(dgate), dweight};
}

}  // namespace
