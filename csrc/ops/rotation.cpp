// The operators of the norm before a rotary embedding. cos and sin, of one dtype, are broadcast over x's
// leading dimensions; they have as many columns as are rotated, or half of them.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "differentiate.h"

namespace {

using Optional = std::optional<Tensor>;
using rmsnorm::Rotation;

// Whose angles they are: cos and sin beside x.
struct Angles {
    Angles(const Tensor& cos_given, const Tensor& sin_given, const View& x, int64_t rotary_dim,
           bool interleaved, bool each)
        : rotation(rotation_of(cos_given, x, rotary_dim, interleaved, each)),
          cos(cos_given, x, "cos", width()),
          sin(sin_given, x, "sin", width()) {
        STD_TORCH_CHECK(cos.dtype() == sin.dtype(), "cos and sin must have one dtype");
    }

    const Rotation rotation;
    const Broadcast cos, sin;

  private:
    int64_t width() const { return rotation.half_width ? rotation.cols / 2 : rotation.cols; }
    static Rotation rotation_of(const Tensor& cos, const View& x, int64_t rotary_dim, bool interleaved,
                                bool each) {
        STD_TORCH_CHECK(rotary_dim > 0 && rotary_dim % 2 == 0 && rotary_dim <= x.cols(),
                        "rotary_dim must be an even number of x's columns");
        const View given(cos, "cos");
        return {rotary_dim, given.cols() != rotary_dim, interleaved, each};
    }
};

Norm rotated(const Tensor& x, const Optional& weight, const Tensor& cos, const Tensor& sin, double eps,
             double weight_offset, int64_t rounding, int64_t rotary_dim, bool interleaved, bool each) {
    Norm norm{View(x, "x"), {}, {}, view(weight, "weight"), {eps, weight_offset, rounding}};
    const Angles angles(cos, sin, norm.x, rotary_dim, interleaved, each);
    norm.cos = angles.cos, norm.sin = angles.sin, norm.rotation = angles.rotation;
    return norm;
}

std::tuple<Tensor, Tensor> rotary_forward(const Tensor& x, const Optional& weight, const Tensor& cos,
                                          const Tensor& sin, double eps, double weight_offset,
                                          int64_t rounding, int64_t rotary_dim, bool interleaved, bool each) {
    const Norm norm =
        rotated(x, weight, cos, sin, eps, weight_offset, rounding, rotary_dim, interleaved, each);
    const View y = empty_y(norm);
    const Tensor rstd = empty_rstd(norm);
    normalize(norm, y, nullptr, &rstd);
    return {y.tensor, rstd};
}

void rotary_forward_out(const Tensor& x, const Optional& weight, const Tensor& cos, const Tensor& sin,
                        double eps, double weight_offset, int64_t rounding, int64_t rotary_dim,
                        bool interleaved, bool each, const Tensor& out) {
    const Norm norm =
        rotated(x, weight, cos, sin, eps, weight_offset, rounding, rotary_dim, interleaved, each);
    norm.check();
    const View y(out, "out");
    const std::optional<View> cosines = view(cos, "cos"), sines = view(sin, "sin");
    check_out(y, norm.y_type(), norm.x, {&norm.weight, &cosines, &sines});
    normalize(norm, y);
}

std::tuple<Optional, Optional> rotary_backward(const Tensor& dy_given, const Tensor& x_given,
                                               const Tensor& rstd_given, const Optional& weight_given,
                                               const Tensor& cos, const Tensor& sin, double weight_offset,
                                               int64_t rotary_dim, bool interleaved, bool each, bool need_dx,
                                               bool need_dweight) {
    const View dy(dy_given, "dy"), x(x_given, "x");
    const std::optional<View> weight = view(weight_given, "weight");
    const Angles angles(cos, sin, x, rotary_dim, interleaved, each);
    STD_TORCH_CHECK(dy.shaped_as(x), "dy must have x's shape");
    std::optional<View> dx;
    if (need_dx) dx = empty_like(x, x.dtype);
    const Layout layout(
        x.dim, x.sizes,
        {x.strides, dy.strides, angles.cos.strides(), angles.sin.strides(), (dx ? *dx : x).strides});
    const int64_t cols = x.cols(), rows = layout.rows();
    const Tensor rstd = values_of_groups(rstd_given, rows);
    const Gain gain(weight, weight_offset, cols, x.dtype);
    const rmsnorm::Kernels& kernels = table();

    const int64_t scratch_floats = rmsnorm::rotated_scratch(cols);
    const Tiles tiles(rows, cols, {&dy, &x, dx ? &*dx : &x});
    auto work = [&](int64_t begin, int64_t end, rmsnorm::Vector dweight, float* scratch) {
        tiles.for_each(layout, begin, end, scratch + scratch_floats, [&](Tile& tile) {
            const Layout::Run& run = tile.run();
            rmsnorm::RotatedBackward part{};
            part.rows = run.rows, part.cols = cols;
            part.x = tile.read(x, 0), part.dy = tile.read(dy, 1);
            part.cos = angles.cos.rows(run, 2), part.sin = angles.sin.rows(run, 3);
            if (dx) part.dx = tile.write(*dx, 4);
            part.rstd = {floats(rstd) + run.first, true};
            part.gain = gain.vector();
            part.dweight = dweight;
            part.rotation = angles.rotation;
            part.scratch = scratch;
            kernels.rotated_backward(part);
        });
    };
    const Result dweight = sum_rows(rows, cols, need_dweight, weight ? weight->dtype : Dtype::f32,
                                    scratch_floats + tiles.floats(), work);
    return {tensor_of(dx), dweight};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rmsnorm, m) {
#define ROTATED                                                                          \
    "Tensor x, Tensor? weight, Tensor cos, Tensor sin, float eps, float weight_offset, " \
    "int rounding, int rotary_dim, bool interleaved, bool each"
    m.def("rotary_forward(" ROTATED ") -> (Tensor y, Tensor rstd)");
    m.def("rotary_forward_out(" ROTATED ", Tensor(a!) out) -> ()");
    m.def(
        "rotary_backward(Tensor dy, Tensor x, Tensor rstd, Tensor? weight, Tensor cos, Tensor sin, float "
        "weight_offset, int rotary_dim, bool interleaved, bool each, bool need_dx, bool need_dweight) -> "
        "(Tensor? dx, Tensor? dweight)");
#undef ROTATED
}

STABLE_TORCH_LIBRARY_IMPL(rmsnorm, CPU, m) {
    m.impl("rotary_forward", TORCH_BOX(&rotary_forward));
    m.impl("rotary_forward_out", TORCH_BOX(&rotary_forward_out));
    m.impl("rotary_backward", TORCH_BOX(&rotary_backward));
}
