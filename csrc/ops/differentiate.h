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
    call.counted = given.spec.partial ? given.spec.partial : group_cols;
    call.gate_first = given.spec.gate_first;
    call.activation = static_cast<Activation>(given.spec.activation);
    const Dtype dweight_type = given.weight ? given.weight->dtype : Dtype::f32;
    const int64_t scratch_floats = rmsnorm::backward_scratch(call);
    const Tiles tiles(rows, cols, {&dy, &x, &second, &result, dgate ? &*dgate : &x});
    auto work = [&](int64_t begin, int64_t end, rmsnorm::Vector dweight, float* scratch) {
        tiles.for_each(layout, begin, end, scratch + scratch_floats, [&](Tile& tile) {
            const Layout::Run& run = tile.run();
            rmsnorm::Backward part = call;
            part.rows = run.rows;
            part.rstd = {floats(rstd) + run.first * groups, true};
            part.dy = tile.read(dy, 0);
            part.x = tile.read(x, 1);
            const Rows dx_rows = dx ? tile.write(*dx, 3) : Rows{};
            if (rebuilds) {
                kernels.rebuild({part.x, dx_rows, part.rstd, call.gain, run.rows, cols});
                part.x = dx_rows;
            }
            if (given.gate) part.gate = tile.read(second, 2);
            if (given.dh) part.dh = tile.read(second, 2);
            if (given.need_dx) part.dx = dx_rows;
            if (dgate) part.dgate = tile.write(*dgate, 3);
            part.dweight = dweight;
            part.scratch = scratch;
            kernels.backward(part);
        });
    };
    const Result dweight =
        sum_rows(rows, cols, given.need_dweight, dweight_type, scratch_floats + tiles.floats(), work);
    return {given.need_dx ? tensor_of(dx) : std::nullopt, tensor_of(dgate), dweight};
}

}  // namespace
