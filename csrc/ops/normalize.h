// The forward of every operator: from tensors and options to the kernels' rows.
#pragma once

#include <cmath>

#include "tensors.h"
#include "threads.h"
#include "tiles.h"

namespace {

using rmsnorm::Activation;

// The fields of NormSpec (src/rmsnorm/spec.py), in its order.
struct Spec {
    double eps = 0, weight_offset = 0;
    int64_t rounding = 0, group_size = 0, activation = 0;  // group_size 0: the whole row
    bool gate_first = false, exact_sum = false;
    double alpha = 1;
    int64_t partial = 0;  // how many columns count; 0: all
};

enum Rounding : int64_t { once = 0, before_scale = 1, weight_dtype = 2 };  // reference.ROUNDINGS

// reference.result_dtype
inline Dtype result_dtype(Dtype x, const std::optional<View>& weight, int64_t rounding) {
    STD_TORCH_CHECK(rounding >= once && rounding <= weight_dtype, "unknown rounding");
    if (!weight || rounding == once) return x;
    return rounding == weight_dtype || weight->dtype == x ? weight->dtype : Dtype::f32;
}

// What x_hat is rounded to before the gain.
inline Dtype x_hat_dtype(Dtype x, const std::optional<View>& weight, int64_t rounding) {
    if (rounding == before_scale) return x;
    return rounding == weight_dtype && weight ? weight->dtype : Dtype::f32;
}

// Input and output that together exceed this are taken to exceed the last cache. It is the share of one core
// complex of a current server; what the system reports was seen to be ten times the truth in a virtual
// machine.
constexpr int64_t cache_bytes = int64_t(32) << 20;

// Whether y is written past the cache: it would not stay there anyway, and its old contents need not be read.
// Its rows must begin and end at cache lines.
inline bool past_the_cache(const View& x, const View& y) {
    if (x.bytes() + y.bytes() <= cache_bytes || x.data == y.data || !y.adjacent()) return false;
    const int64_t size = rmsnorm::size_of(y.dtype);
    bool aligned = reinterpret_cast<uintptr_t>(y.data) % 64 == 0 && y.cols() * size % 64 == 0;
    for (int64_t d = 0; d < y.dim - 1; ++d) aligned = aligned && y.strides[d] * size % 64 == 0;
    return aligned;
}

// weight + weight_offset in float32: the weight's own memory where that is the same thing.
class Gain {
  public:
    Gain(const std::optional<View>& given, double offset, int64_t cols, Dtype y_type) {
        if (!given) return;
        weight_ = given->packed();
        const std::optional<View>& weight = weight_;
        STD_TORCH_CHECK(weight->dim == 1 && weight->cols() == cols,
                        "weight must have one element per column");
        // Rounding to bfloat16 needs NaNs cleaned up, which the copy does.
        if (weight->dtype == Dtype::f32 && offset == 0 && y_type != Dtype::bf16) {
            values_ = {reinterpret_cast<float*>(weight->data), true};
            return;
        }
        copy_.emplace(cols);
        table().gain(weight->data, weight->dtype, offset, copy_->get(), cols);
        values_ = {copy_->get(), true};
    }
    Gain(const Gain&) = delete;
    rmsnorm::Vector vector() const { return values_; }

  private:
    std::optional<View> weight_;
    std::optional<Floats> copy_;
    rmsnorm::Vector values_{};
};

// What goes into a forward. Checks here guard memory; the messages that a user sees come from Python.
struct Norm {
    View x;
    std::optional<View> residual, gate, weight;
    Spec spec;
    std::optional<Broadcast> scale{}, shift{};  // without residual and gate
    std::optional<Broadcast> cos{}, sin{};      // without any of these
    rmsnorm::Rotation rotation{};

    bool gate_last() const { return gate && !spec.gate_first; }
    int64_t group_cols() const { return spec.group_size ? spec.group_size : x.cols(); }
    int64_t groups() const { return x.cols() / group_cols(); }
    // Of the norm itself, and of y.
    Dtype normed_type() const { return result_dtype(x.dtype, weight, spec.rounding); }
    Dtype y_type() const { return gate_last() ? x.dtype : normed_type(); }

    void check() const {
        STD_TORCH_CHECK(
            std::isfinite(spec.eps) && std::isfinite(spec.weight_offset) && std::isfinite(spec.alpha),
            "eps, weight_offset and alpha must be finite");
        check_groups(x, spec);
        STD_TORCH_CHECK(!residual || residual->shaped_as(x), "residual must have x's shape");
        STD_TORCH_CHECK(!gate || gate->shaped_as(x), "gate must have x's shape");
        STD_TORCH_CHECK(!scale || !shift || scale->dtype() == shift->dtype(),
                        "scale and shift must have one dtype");
    }
    static void check_groups(const View& x, const Spec& spec) {
        STD_TORCH_CHECK(spec.group_size >= 0 && (!spec.group_size || x.cols() % spec.group_size == 0),
                        "group_size must divide the columns");
        STD_TORCH_CHECK(spec.partial >= 0 && spec.partial <= x.cols(), "partial must be a number of columns");
        STD_TORCH_CHECK(spec.activation == 0 || spec.activation == 1, "unknown activation");
    }
};

inline View empty_y(const Norm& norm) { return empty_like(norm.x, norm.y_type()); }
inline Tensor empty_rstd(const Norm& norm) {
    norm.check();
    return empty_rstd(norm.x, norm.groups());
}

// What is the same for all rows.
inline rmsnorm::Forward forward_of(const Norm& norm, Dtype y_type, const View* h, const Gain& gain) {
    const View& x = norm.x;
    rmsnorm::Forward call{};
    call.x.dtype = x.dtype, call.y.dtype = y_type;
    call.residual.given = call.h.given = h;
    if (h) call.h.dtype = h->dtype;
    call.gate.given = norm.gate.has_value();
    call.scale.given = norm.scale.has_value(), call.shift.given = norm.shift.has_value();
    call.cos.given = call.sin.given = norm.cos.has_value();
    if (norm.cos) call.cos.dtype = norm.cos->dtype(), call.rotation = norm.rotation;
    call.gain = gain.vector();
    call.cols = norm.group_cols();
    call.groups = norm.groups();
    call.counted = norm.spec.partial ? norm.spec.partial : call.cols;
    call.eps = norm.spec.eps;
    call.alpha = norm.spec.alpha;
    call.exact_sum = norm.spec.exact_sum;
    call.gate_first = norm.spec.gate_first;
    call.activation = static_cast<Activation>(norm.spec.activation);
    call.x_hat_type = x_hat_dtype(x.dtype, norm.weight, norm.spec.rounding);
    call.normed_type = norm.spec.rounding == once ? Dtype::f32 : norm.normed_type();
    return call;
}

// y = norm(x), or h = x + residual and y = norm(h), or one of the two with a gate; rstd where wanted.
inline void normalize(const Norm& norm, const View& y, const View* h = nullptr,
                      const Tensor* rstd = nullptr) {
    norm.check();
    const View& x = norm.x;
    const View& second = norm.gate ? *norm.gate : norm.residual ? *norm.residual : x;
    const int64_t* const strides = norm.scale ? norm.scale->strides()
                                   : norm.cos ? norm.cos->strides()
                                              : second.strides;
    const int64_t* const fourth = norm.shift ? norm.shift->strides()
                                  : norm.sin ? norm.sin->strides()
                                  : h        ? h->strides
                                             : x.strides;
    const Gain gain(norm.weight, norm.spec.weight_offset, x.cols(), y.dtype);
    const rmsnorm::Kernels& kernels = table();
    const Layout layout(x.dim, x.sizes, {x.strides, y.strides, strides, fourth});

    rmsnorm::Forward call = forward_of(norm, y.dtype, h, gain);
    call.nontemporal =
        past_the_cache(x, y) && (call.groups == 1 || call.cols * rmsnorm::size_of(y.dtype) % 64 == 0);
    const int64_t scratch_floats = rmsnorm::forward_scratch(call);
    const Tiles tiles(layout.rows(), x.cols(), {&x, &y, &second, h ? h : &x});
    for_rows(layout.rows(), x.cols(), [&](int64_t begin, int64_t end) {
        const Floats scratch(scratch_floats + tiles.floats());
        tiles.for_each(layout, begin, end, scratch.get() + scratch_floats, [&](Tile& tile) {
            const Layout::Run& run = tile.run();
            rmsnorm::Forward part = call;
            part.rows = run.rows;
            part.x = tile.read(x, 0);
            part.y = tile.write(y, 1);
            if (norm.gate) part.gate = tile.read(second, 2);
            if (norm.scale) part.scale = norm.scale->rows(run, 2);
            if (norm.shift) part.shift = norm.shift->rows(run, 3);
            if (norm.cos) part.cos = norm.cos->rows(run, 2), part.sin = norm.sin->rows(run, 3);
            if (h) part.residual = tile.read(second, 2), part.h = tile.write(*h, 3);
            if (rstd) part.rstd = {floats(*rstd) + run.first * call.groups, true};
            part.scratch = scratch.get();
            kernels.forward(part);
        });
    });
}

}  // namespace
