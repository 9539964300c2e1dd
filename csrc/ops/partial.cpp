// The operators of partial statistics: the mean is over the first `partial` columns, and scales all of them.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "differentiate.h"

namespace {

using Optional = std::optional<Tensor>;

Norm partial_norm(const Tensor& x, const Optional& weight, double eps, double weight_offset, int64_t rounding,
                  int64_t partial) {
    Norm norm{View(x, "x"), {}, {}, view(weight, "weight"), {eps, weight_offset, rounding}};
    norm.spec.partial = partial;
    return norm;
}

Tensor partial_forward(const Tensor& x, const Optional& weight, double eps, double weight_offset,
                       int64_t rounding, int64_t partial) {
    const Norm norm = partial_norm(x, weight, eps, weight_offset, rounding, partial);
    const View y = empty_y(norm);
    normalize(norm, y);
    return y.tensor;
}

std::tuple<Tensor, Tensor> partial_forward_train(const Tensor& x, const Optional& weight, double eps,
                                                 double weight_offset, int64_t rounding, int64_t partial) {
    const Norm norm = partial_norm(x, weight, eps, weight_offset, rounding, partial);
    const View y = empty_y(norm);
    const Tensor rstd = empty_rstd(norm);
    normalize(norm, y, nullptr, &rstd);
    return {y.tensor, rstd};
}

std::tuple<Optional, Optional> partial_backward(const Tensor& dy, const Tensor& x, const Tensor& rstd,
                                                const Optional& weight, double weight_offset, int64_t partial,
                                                bool need_dx, bool need_dweight) {
    Spec spec;
    spec.weight_offset = weight_offset;
    spec.partial = partial;
    const Gradients found = differentiate({View(dy, "dy"),
                                           View(x, "x"),
                                           {},
                                           view(weight, "weight"),
                                           {},
                                           rstd,
                                           spec,
                                           need_dx,
                                           false,
                                           need_dweight,
                                           std::nullopt});
    return {found.dx, found.dweight};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rmsnorm, m) {
    m.def(
        "partial_forward(Tensor x, Tensor? weight, float eps, float weight_offset, int rounding, int "
        "partial) -> "
        "Tensor");
    m.def(
        "partial_forward_train(Tensor x, Tensor? weight, float eps, float weight_offset, int rounding, int "
        "partial) -> (Tensor y, Tensor rstd)");
    m.def(
        "partial_backward(Tensor dy, Tensor x, Tensor rstd, Tensor? weight, float weight_offset, int "
        "partial, bool "
        "need_dx, bool need_dweight) -> (Tensor? dx, Tensor? dweight)");
}

STABLE_TORCH_LIBRARY_IMPL(rmsnorm, CPU, m) {
    m.impl("partial_forward", TORCH_BOX(&partial_forward));
    m.impl("partial_forward_train", TORCH_BOX(&partial_forward_train));
    m.impl("partial_backward", TORCH_BOX(&partial_backward));
}
