// The norm and the quantisation of its result, which stays in the cache between the two.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "normalize.h"

namespace {

using Optional = std::optional<Tensor>;

// Rows that are normed and quantised together.
constexpr int64_t bytes_together = int64_t(32) << 10;

ScalarType type_of(rmsnorm::Quantized type) {
    return type == rmsnorm::Quantized::int8     ? ScalarType::Char
           : type == rmsnorm::Quantized::e4m3fn ? ScalarType::Float8_e4m3fn
                                                : ScalarType::Float8_e5m2;
}

std::tuple<Tensor, Tensor, Optional, Optional> quantized_forward(
    const Tensor& x_given, const Optional& residual, const Optional& gate, const Optional& weight, double eps,
    double weight_offset, int64_t rounding, int64_t group_size, int64_t activation, bool gate_first,
    bool exact_sum, double alpha, const Optional& scale, int64_t type, int64_t scale_kind, int64_t block_size,
    double largest, double most, double smallest, double lowest, bool need_norm) {
    auto packed = [](const Optional& t, const char* name) {
        return t ? std::optional<View>(View(*t, name).packed()) : std::nullopt;
    };
    const Spec spec{eps, weight_offset, rounding, group_size, activation, gate_first, exact_sum, alpha};
    const Norm norm{View(x_given, "x").packed(), packed(residual, "residual"), packed(gate, "gate"),
                    view(weight, "weight"), spec};
    norm.check();
    const View& x = norm.x;
    const int64_t cols = x.cols(), block = block_size ? block_size : cols;
    STD_TORCH_CHECK(block > 0 && cols % block == 0, "block_size must divide the columns");
    STD_TORCH_CHECK(type >= 0 && type <= 2 && scale_kind >= 0 && scale_kind <= 2,
                    "unknown type of q or scale");
    STD_TORCH_CHECK(!residual || !gate, "a residual or a gate, not both");
    const int64_t blocks = cols / block;

    std::optional<View> y, h;
    if (need_norm) y = empty_like(x, norm.y_type());
    if (norm.residual) h = empty_like(x, norm.residual->dtype);
    const View& second = norm.gate ? *norm.gate : norm.residual ? *norm.residual : x;
    const Layout layout(x.dim, x.sizes,
                        {x.strides, (y ? *y : x).strides, second.strides, (h ? *h : x).strides});
    std::vector<int64_t> sizes(x.sizes, x.sizes + x.dim);
    auto made = [&](ScalarType scalar) {
        return empty(x.dim, sizes.data(), rmsnorm::contiguous_strides(x.dim, sizes.data()).data(), scalar);
    };
    rmsnorm::Quantize quantize{};
    quantize.type = static_cast<rmsnorm::Quantized>(type);
    quantize.scale = static_cast<rmsnorm::Scale>(scale_kind);
    const Tensor q = made(type_of(quantize.type));
    sizes.back() = blocks;
    const Tensor scales = made(scale_kind ? ScalarType::Float8_e8m0fnu : ScalarType::Float);
    if (scale) {
        STD_TORCH_CHECK(!scale_kind && scale->is_cpu() && scale->scalar_type() == ScalarType::Float &&
                            scale->numel() == layout.rows() * blocks && scale->is_contiguous(),
                        "scale must have a contiguous float32 for each block");
        check_storage(*scale, scale->numel(), sizeof(float), "scale");
    }
    quantize.blocks = blocks, quantize.cols = block;
    quantize.largest = float(largest), quantize.most = float(most);
    quantize.smallest = float(smallest), quantize.lowest = float(lowest);

    const Dtype y_type = norm.y_type();
    const Gain gain(norm.weight, norm.spec.weight_offset, cols, y_type);
    const rmsnorm::Forward call = forward_of(norm, y_type, h ? &*h : nullptr, gain);
    const rmsnorm::Kernels& kernels = table();
    const int64_t together = std::max<int64_t>(1, bytes_together / (cols * 4));
    const int64_t forward_floats = rmsnorm::forward_scratch(call), y_floats = together * cols;
    for_rows(layout.rows(), cols, [&](int64_t begin, int64_t end) {
        const Floats scratch(forward_floats + y_floats + cols);
        float* const normed = scratch.get() + forward_floats;
        layout.for_each_run(begin, end, [&](const Layout::Run& run) {
            auto rows = [&](const View& t, int which, int64_t first) {
                Rows found = t.rows(run, which);
                found.data =
                    static_cast<char*>(found.data) + first * found.stride * rmsnorm::size_of(found.dtype);
                return found;
            };
            for (int64_t r = 0; r < run.rows; r += together) {
                rmsnorm::Forward part = call;
                part.rows = std::min(together, run.rows - r);
                part.x = rows(x, 0, r);
                part.y = y ? rows(*y, 1, r) : Rows{normed, cols, y_type, true};
                if (norm.gate) part.gate = rows(second, 2, r);
                if (h) part.residual = rows(second, 2, r), part.h = rows(*h, 3, r);
                part.scratch = scratch.get();
                kernels.forward(part);
                rmsnorm::Quantize then = quantize;
                const int64_t first = run.first + r;
                then.rows = part.rows, then.y = part.y;
                then.q = static_cast<char*>(q.data_ptr()) + first * cols;
                then.scales = static_cast<char*>(scales.data_ptr()) + first * blocks * (scale_kind ? 1 : 4);
                if (scale) then.given = {floats(*scale) + first * blocks, true};
                then.scratch = normed + y_floats;
                kernels.quantize(then);
            }
        });
    });
    return {q, scales, tensor_of(y), tensor_of(h)};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rmsnorm, m) {
    m.def(
        "quantized_forward(Tensor x, Tensor? residual, Tensor? gate, Tensor? weight, float eps, float "
        "weight_offset, "
        "int rounding, int group_size, int activation, bool gate_first, bool exact_sum, float alpha, Tensor? "
        "scale, "
        "int type, int scale_kind, int block_size, float largest, float most, float smallest, float lowest, "
        "bool need_norm) -> (Tensor q, Tensor scale, Tensor? norm, Tensor? h)");
}

STABLE_TORCH_LIBRARY_IMPL(rmsnorm, CPU, m) { m.impl("quantized_forward", TORCH_BOX(&quantized_forward)); }
