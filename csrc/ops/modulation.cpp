// The operators of modulation, y = norm(x) * (1 + scale) + shift; scale and shift, of one dtype, are
// broadcast over x's leading dimensions.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "differentiate.h"

namespace {

using Optional = std::optional<Tensor>;

Norm modulated(const Tensor& x, const Optional& weight, const Optional& scale, const Optional& shift,
               double eps, double weight_offset, int64_t rounding) {
    Norm norm{View(x, "x"), {}, {}, view(weight, "weight"), {eps, weight_offset, rounding}};
    norm.scale = broadcast(scale, norm.x, "scale");
    norm.shift = broadcast(shift, norm.x, "shift");
    return norm;
}

Tensor modulated_forward(const Tensor& x, const Optional& weight, const Optional& scale,
                         const Optional& shift, double eps, double weight_offset, int64_t rounding) {
    const Norm norm = modulated(x, weight, scale, shift, eps, weight_offset, rounding);
    const View y = empty_y(norm);
    normalize(norm, y);
    return y.tensor;
}

std::tuple<Tensor, Tensor> modulated_forward_train(const Tensor& x, const Optional& weight,
                                                   const Optional& scale, const Optional& shift, double eps,
                                                   double weight_offset, int64_t rounding) {
    const Norm norm = modulated(x, weight, scale, shift, eps, weight_offset, rounding);
    const View y = empty_y(norm);
    const Tensor rstd = empty_rstd(norm);
    normalize(norm, y, nullptr, &rstd);
    return {y.tensor, rstd};
}

// (kept leading dimensions..., 1..., columns): the sums from column `begin` of all sums on, rounded.
Tensor sums_as_tensor(const Sums& sums, int64_t begin, const View& x, int64_t shared, Dtype dtype) {
    std::vector<int64_t> sizes(x.sizes, x.sizes + x.dim);
    std::fill(sizes.end() - 1 - shared, sizes.end() - 1, 1);
    const std::vector<int64_t> strides = rmsnorm::contiguous_strides(x.dim, sizes.data());
    Tensor made = empty(x.dim, sizes.data(), strides.data(), scalar_type(dtype));
    char* data = static_cast<char*>(made.data_ptr());
    const int64_t segments = made.numel() / x.cols();
    for_rows(segments, x.cols(), [&](int64_t first, int64_t end) {
        for (int64_t segment = first; segment < end; ++segment)
            table().round(sums.total(segment) + begin, data + segment * x.cols() * rmsnorm::size_of(dtype),
                          dtype, x.cols());
    });
    return made;
}

// dscale and dshift, each where its dtype is given, are sums over the last `shared` leading dimensions;
// dweight is one over all rows, and wanted beside them only where that is the same.
std::tuple<Optional, Optional, Optional, Optional> modulated_backward(
    const Tensor& dy_given, const Tensor& x_given, const Tensor& rstd_given, const Optional& weight_given,
    const Optional& scale_given, double weight_offset, int64_t rounding, int64_t shared, bool need_dx,
    bool need_dweight, std::optional<ScalarType> dscale_type, std::optional<ScalarType> dshift_type) {
    const View dy(dy_given, "dy"), x(x_given, "x");
    const std::optional<View> weight = view(weight_given, "weight");
    const std::optional<Broadcast> scale = broadcast(scale_given, x, "scale");
    STD_TORCH_CHECK(dy.shaped_as(x) && dy.dtype == result_dtype(x.dtype, weight, rounding),
                    "dy must have x's shape and the result's dtype");
    STD_TORCH_CHECK(shared >= 0 && shared < x.dim, "shared must be a number of leading dimensions");
    std::optional<View> dx;
    if (need_dx) dx = empty_like(x, x.dtype);
    const Layout layout(
        x.dim, x.sizes,
        {dy.strides, x.strides, scale ? scale->strides() : x.strides, (dx ? *dx : x).strides});
    const int64_t cols = x.cols(), rows = layout.rows();
    // Without dscale and dshift all rows are one segment.
    int64_t segments = 1, segment_rows = 1;
    for (int64_t d = 0; d < x.dim - 1; ++d)
        ((dscale_type || dshift_type) && d < x.dim - 1 - shared ? segments : segment_rows) *= x.sizes[d];
    STD_TORCH_CHECK(!need_dweight || segments == 1,
                    "dweight is a sum over all rows, dscale and dshift are not");
    const Tensor rstd = values_of_groups(rstd_given, rows);
    const Gain gain(weight, weight_offset, cols, x.dtype);
    const rmsnorm::Kernels& kernels = table();

    rmsnorm::ModulatedBackward call{};
    call.gain = gain.vector();
    call.cols = cols;
    call.x_hat_type = x_hat_dtype(x.dtype, weight, rounding);
    call.normed_type = rounding == once ? Dtype::f32 : dy.dtype;
    const int64_t before_dscale = need_dweight ? cols : 0;
    const int64_t before_dshift = before_dscale + (dscale_type ? cols : 0);
    const int64_t width = before_dshift + (dshift_type ? cols : 0);
    const int64_t scratch_floats = rmsnorm::modulated_scratch(cols);
    const Tiles tiles(rows, cols, {&dy, &x, dx ? &*dx : &x});
    auto work = [&](int64_t begin, int64_t end, float* sums, float* scratch) {
        tiles.for_each(layout, begin, end, scratch + scratch_floats, [&](Tile& tile) {
            const Layout::Run& run = tile.run();
            rmsnorm::ModulatedBackward part = call;
            part.rows = run.rows;
            part.rstd = {floats(rstd) + run.first, true};
            part.dy = tile.read(dy, 0), part.x = tile.read(x, 1);
            if (scale) part.scale = scale->rows(run, 2);
            if (dx) part.dx = tile.write(*dx, 3);
            if (need_dweight) part.dweight = {sums, true};
            if (dscale_type) part.dscale = {sums + before_dscale, true};
            if (dshift_type) part.dshift = {sums + before_dshift, true};
            part.scratch = scratch;
            kernels.modulated_backward(part);
        });
    };
    const Sums sums =
        sum_segments(segments, segment_rows, cols, width, scratch_floats + tiles.floats(), work);
    Result dweight, dscale, dshift;
    if (need_dweight) {
        const Dtype type = weight ? weight->dtype : Dtype::f32;
        dweight = empty_vector(cols, scalar_type(type));
        kernels.round(sums.total(0), dweight->data_ptr(), type, cols);
    }
    if (dscale_type) dscale = sums_as_tensor(sums, before_dscale, x, shared, dtype_of(*dscale_type));
    if (dshift_type) dshift = sums_as_tensor(sums, before_dshift, x, shared, dtype_of(*dshift_type));
    return {tensor_of(dx), dweight, dscale, dshift};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rmsnorm, m) {
#define MODULATED                                                                                  \
    "Tensor x, Tensor? weight, Tensor? scale, Tensor? shift, float eps, float weight_offset=0.0, " \
    "int rounding=0"
    m.def("modulated_forward(" MODULATED ") -> Tensor");
    m.def("modulated_forward_train(" MODULATED ") -> (Tensor y, Tensor rstd)");
    m.def(
        "modulated_backward(Tensor dy, Tensor x, Tensor rstd, Tensor? weight, Tensor? scale, float "
        "weight_offset, "
        "int rounding, int shared, bool need_dx, bool need_dweight, ScalarType? dscale_dtype, "
        "ScalarType? dshift_dtype) -> (Tensor? dx, Tensor? dweight, Tensor? dscale, Tensor? dshift)");
#undef MODULATED
}

STABLE_TORCH_LIBRARY_IMPL(rmsnorm, CPU, m) {
    m.impl("modulated_forward", TORCH_BOX(&modulated_forward));
    m.impl("modulated_forward_train", TORCH_BOX(&modulated_forward_train));
    m.impl("modulated_backward", TORCH_BOX(&modulated_backward));
}
