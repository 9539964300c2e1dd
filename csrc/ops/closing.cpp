// The norm that closes a branch, h = norm(x) + residual, and in the same pass the norm of h that opens the
// next.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "normalize.h"

namespace {

using Optional = std::optional<Tensor>;

// The norm of h, which stays in the cache since it was written.
struct Next {
    std::optional<View> weight;
    double eps;
    const View& y;
    const Tensor& rstd;
};

// Rows that go through both norms together: enough of them that calls do not cost, few enough for the cache.
constexpr int64_t bytes_together = int64_t(32) << 10;

inline Rows rows_from(Rows rows, int64_t first) {
    rows.data = static_cast<char*>(rows.data) + first * rows.stride * rmsnorm::size_of(rows.dtype);
    return rows;
}

void close(const Norm& norm, const View& residual, const View& h, const Tensor& rstd, const Next* next) {
    const View& x = norm.x;
    const View& y = next ? next->y : h;
    const Dtype n = norm.normed_type();
    const Gain gain(norm.weight, norm.spec.weight_offset, x.cols(), h.dtype == Dtype::bf16 ? h.dtype : n);
    const Gain next_gain(next ? next->weight : std::nullopt, norm.spec.weight_offset, x.cols(), y.dtype);
    const rmsnorm::Kernels& kernels = table();
    const Layout layout(x.dim, x.sizes, {x.strides, residual.strides, h.strides, y.strides});

    rmsnorm::Forward first{};
    first.x.dtype = x.dtype, first.y.dtype = h.dtype;
    first.addend = {nullptr, 0, residual.dtype, true};
    first.gain = gain.vector();
    first.cols = first.counted = x.cols(), first.groups = 1;
    first.eps = norm.spec.eps, first.alpha = 1;
    first.x_hat_type = x_hat_dtype(x.dtype, norm.weight, norm.spec.rounding);
    first.normed_type = n;

    rmsnorm::Forward second = first;
    second.addend = {};
    int64_t together = layout.rows();
    if (next) {
        second.x.dtype = h.dtype, second.y.dtype = y.dtype;
        second.gain = next_gain.vector();
        second.eps = next->eps;
        second.x_hat_type = x_hat_dtype(n, next->weight, norm.spec.rounding);
        second.normed_type = Dtype::f32;
        second.nontemporal = past_the_cache(x, y);
        together = std::max<int64_t>(1, bytes_together / (x.cols() * 4));
    }
    const int64_t scratch_floats = rmsnorm::forward_scratch(first);
    const Tiles tiles(layout.rows(), x.cols(), {&x, &residual, &h, &y});
    for_rows(layout.rows(), x.cols(), [&](int64_t begin, int64_t end) {
        const Floats scratch(scratch_floats + tiles.floats());
        tiles.for_each(layout, begin, end, scratch.get() + scratch_floats, [&](Tile& tile) {
            const Layout::Run& run = tile.run();
            const Rows x_rows = tile.read(x, 0), addends = tile.read(residual, 1), h_rows = tile.write(h, 2);
            const Rows y_rows = next ? tile.write(y, 3) : Rows{};
            for (int64_t r = 0; r < run.rows; r += together) {
                rmsnorm::Forward part = first;
                part.rows = std::min(together, run.rows - r);
                part.x = rows_from(x_rows, r);
                part.addend = rows_from(addends, r);
                part.y = rows_from(h_rows, r);
                part.rstd = {floats(rstd) + run.first + r, true};
                part.scratch = scratch.get();
                kernels.forward(part);
                if (!next) continue;
                rmsnorm::Forward after = second;
                after.rows = part.rows;
                after.x = part.y;
                after.y = rows_from(y_rows, r);
                after.rstd = {floats(next->rstd) + run.first + r, true};
                after.scratch = scratch.get();
                kernels.forward(after);
            }
        });
    });
}

Norm closing(const Tensor& x, const Optional& weight, double eps, double weight_offset, int64_t rounding) {
    const Norm norm{View(x, "x").packed(), {}, {}, view(weight, "weight"), {eps, weight_offset, rounding}};
    norm.check();
    return norm;
}

View beside(const Tensor& residual, const View& x) {
    const View view = View(residual, "residual").packed();
    STD_TORCH_CHECK(view.shaped_as(x), "residual must have x's shape");
    return view;
}

std::tuple<Tensor, Tensor> norm_add_forward(const Tensor& x, const Tensor& residual, const Optional& weight,
                                            double eps, double weight_offset, int64_t rounding) {
    const Norm norm = closing(x, weight, eps, weight_offset, rounding);
    const View added = beside(residual, norm.x), h = empty_like(norm.x, added.dtype);
    const Tensor rstd = empty_rstd(norm);
    close(norm, added, h, rstd, nullptr);
    return {h.tensor, rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> norm_add_norm_forward(const Tensor& x, const Tensor& residual,
                                                                 const Optional& weight,
                                                                 const Optional& next_weight, double eps,
                                                                 double next_eps, double weight_offset,
                                                                 int64_t rounding) {
    const Norm norm = closing(x, weight, eps, weight_offset, rounding);
    STD_TORCH_CHECK(std::isfinite(next_eps), "next_eps must be finite");
    const View added = beside(residual, norm.x), h = empty_like(norm.x, added.dtype);
    const std::optional<View> next = view(next_weight, "next_weight");
    // n, not h, says which dtype y has: it is the branch of add_rms_norm.
    const Dtype n = norm.normed_type();
    const View y = empty_like(norm.x, result_dtype(n, next, rounding));
    const Tensor rstd = empty_rstd(norm), next_rstd = empty_rstd(norm);
    const Next then{next, next_eps, y, next_rstd};
    close(norm, added, h, rstd, &then);
    return {y.tensor, h.tensor, rstd, next_rstd};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rmsnorm, m) {
    m.def(
        "norm_add_forward(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset=0.0, "
        "int rounding=0) -> (Tensor h, Tensor rstd)");
    m.def(
        "norm_add_norm_forward(Tensor x, Tensor residual, Tensor? weight, Tensor? next_weight, float eps, "
        "float next_eps, float weight_offset=0.0, int rounding=0) -> (Tensor y, Tensor h, Tensor rstd, "
        "Tensor next_rstd)");
}

STABLE_TORCH_LIBRARY_IMPL(rmsnorm, CPU, m) {
    m.impl("norm_add_forward", TORCH_BOX(&norm_add_forward));
    m.impl("norm_add_norm_forward", TORCH_BOX(&norm_add_norm_forward));
}
