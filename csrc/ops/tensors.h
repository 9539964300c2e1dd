// What the operators ask of tensors: views of those given, and memory for those returned. The operators'
// files and what they alone include see PyTorch, and only through LibTorch's Stable ABI, so that one build
// serves every release from 2.10.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include "../kernels/kernels.h"
#include "../kernels/rows.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace {

using rmsnorm::Dtype;
using rmsnorm::Layout;
using rmsnorm::Rows;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Fresh outputs this large are asked to come in huge pages: the page faults of small ones cost more than the
// kernel.
constexpr int64_t huge_page_bytes = int64_t(4) << 20;

inline const rmsnorm::Kernels& table() {
    const char* error;
    const rmsnorm::Kernels* chosen = rmsnorm::kernels(&error);
    STD_TORCH_CHECK(chosen, error);
    return *chosen;
}

inline Dtype dtype_of(ScalarType type) {
    switch (type) {
        case ScalarType::Float:
            return Dtype::f32;
        case ScalarType::BFloat16:
            return Dtype::bf16;
        case ScalarType::Half:
            return Dtype::f16;
        default:
            STD_TORCH_CHECK(false, "rmsnorm kernels take float32, bfloat16 and float16");
    }
}

inline ScalarType scalar_type(Dtype dtype) {
    return dtype == Dtype::f32    ? ScalarType::Float
           : dtype == Dtype::bf16 ? ScalarType::BFloat16
                                  : ScalarType::Half;
}

// PyTorch's own message stays on its side of the Stable ABI of 2.10.
[[noreturn]] void no_memory(int64_t dim, const int64_t* sizes, ScalarType type) {
    double mib = (type == ScalarType::Float ? 4.0 : 2.0) / (1 << 20);
    for (int64_t d = 0; d < dim; ++d) mib *= static_cast<double>(sizes[d]);
    STD_TORCH_CHECK(false, "cannot allocate memory: ", static_cast<int64_t>(mib), " MiB");
}

// Elements from the first to the last in memory, the last included.
inline int64_t extent(int64_t dim, const int64_t* sizes, const int64_t* strides) {
    int64_t last = 0;
    for (int64_t d = 0; d < dim; ++d) {
        if (sizes[d] == 0) return 0;
        last += (sizes[d] - 1) * strides[d];
    }
    return last + 1;
}

// Refuses a tensor that reaches beyond its storage. FSDP and offloading free a storage, or all but a part of
// it, and leave the tensor's sizes as they were.
inline void check_storage(const Tensor& tensor, int64_t elements, int64_t element_size, const char* name) {
    if (elements == 0) return;
    int64_t bytes, offset;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &bytes));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(tensor.get(), &offset));
    STD_TORCH_CHECK(bytes >= (offset + elements) * element_size, name,
                    " has no memory: its storage was freed");
}

// What the operators ask of a tensor, asked once. `name` is what errors call it.
struct View {
    Tensor tensor;
    int64_t dim, *sizes, *strides;
    Dtype dtype;
    char* data;

    // Of a result that was made here.
    explicit View(const Tensor& made) : tensor(made) { read_metadata(); }

    View(const Tensor& given, const char* name) : tensor(given) {
        static const int32_t cpu = aoti_torch_device_type_cpu();
        int32_t device;
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device));
        STD_TORCH_CHECK(device == cpu, "expected ", name, " on the CPU");
        read_metadata();
        check_storage(tensor, extent(dim, sizes, strides), rmsnorm::size_of(dtype), name);
        STD_TORCH_CHECK(dim > 0 && cols() > 0, "expected at least one dimension, the last not empty");
    }

    Tensor contiguous() const {
        try {
            return torch::stable::contiguous(tensor);
        } catch (const std::exception&) {
            no_memory(dim, sizes, tensor.scalar_type());
        }
    }
    bool adjacent() const { return cols() == 1 || strides[dim - 1] == 1; }
    // Itself, or a copy whose columns are adjacent.
    View packed() const { return adjacent() ? *this : View(contiguous()); }
    int64_t cols() const { return sizes[dim - 1]; }
    int64_t numel() const {
        int64_t n = 1;
        for (int64_t d = 0; d < dim; ++d) n *= sizes[d];
        return n;
    }
    int64_t bytes() const { return numel() * rmsnorm::size_of(dtype); }
    bool shaped_as(const View& other) const {
        return dim == other.dim && std::equal(sizes, sizes + dim, other.sizes);
    }
    bool lies_as(const View& other) const {
        return data == other.data && dtype == other.dtype &&
               std::equal(strides, strides + dim, other.strides);
    }
    // Whether the memory between its first and its last element has nothing in common with that of `other`.
    bool apart_from(const View& other) const { return end() <= other.data || other.end() <= data; }
    Rows rows(const Layout::Run& run, int which) const {
        return {data + run.offset[which] * rmsnorm::size_of(dtype), run.stride[which], dtype, true};
    }

  private:
    const char* end() const { return data + extent(dim, sizes, strides) * rmsnorm::size_of(dtype); }
    void read_metadata() {
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor.get(), &dim));
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor.get(), &sizes));
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor.get(), &strides));
        dtype = dtype_of(tensor.scalar_type());
        data = static_cast<char*>(tensor.data_ptr());
    }
};

// A tensor as it is broadcast over the leading dimensions of x.
class Broadcast {
  public:
    Broadcast(const Tensor& given, const View& x, const char* name) : Broadcast(given, x, name, x.cols()) {}
    // With columns of its own.
    Broadcast(const Tensor& given, const View& x, const char* name, int64_t cols)
        : view_(View(given, name).packed()), strides_(static_cast<size_t>(x.dim), 0) {
        const int64_t missing = x.dim - view_.dim;
        bool fits = missing >= 0 && view_.cols() == cols;
        for (int64_t d = 0; fits && d < view_.dim - 1; ++d) {
            const bool repeated = view_.sizes[d] == 1;
            fits = repeated || view_.sizes[d] == x.sizes[missing + d];
            strides_[missing + d] = repeated ? 0 : view_.strides[d];
        }
        STD_TORCH_CHECK(fits, name, " must have ", cols,
                        " columns, and broadcast over x's leading dimensions");
    }
    Dtype dtype() const { return view_.dtype; }
    const int64_t* strides() const { return strides_.data(); }
    Rows rows(const Layout::Run& run, int which) const { return view_.rows(run, which); }

  private:
    View view_;
    std::vector<int64_t> strides_;
};

inline std::optional<Broadcast> broadcast(const std::optional<Tensor>& t, const View& x, const char* name) {
    return t ? std::optional<Broadcast>(std::in_place, *t, x, name) : std::nullopt;
}

inline Tensor empty(int64_t dim, const int64_t* sizes, const int64_t* strides, ScalarType type) {
    AtenTensorHandle handle;
    const int32_t failed = aoti_torch_empty_strided(dim, sizes, strides, static_cast<int32_t>(type),
                                                    aoti_torch_device_type_cpu(), 0, &handle);
    if (failed) no_memory(dim, sizes, type);
    return Tensor(handle);
}

inline Tensor empty_vector(int64_t size, ScalarType type) {
    const int64_t stride = 1;
    return empty(1, &size, &stride, type);
}

inline void ask_for_huge_pages([[maybe_unused]] const Tensor& t, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (bytes < huge_page_bytes) return;
    constexpr uintptr_t page = uintptr_t(2) << 20;
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(t.data_ptr()) + page - 1) & ~(page - 1);
    const uintptr_t end = (reinterpret_cast<uintptr_t>(t.data_ptr()) + uintptr_t(bytes)) & ~(page - 1);
    // A refusal (an old kernel, huge pages off) costs speed only.
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// A tensor of x's shape, laid out as x where x's layout is dense, else contiguous.
inline View empty_like(const View& x, Dtype dtype) {
    const int64_t* strides = x.strides;
    std::vector<int64_t> contiguous;
    if (!rmsnorm::dense(x.dim, x.sizes, x.strides)) {
        contiguous = rmsnorm::contiguous_strides(x.dim, x.sizes);
        strides = contiguous.data();
    }
    Tensor made = empty(x.dim, x.sizes, strides, scalar_type(dtype));
    ask_for_huge_pages(made, x.numel() * rmsnorm::size_of(dtype));
    return View(made);
}

// x's shape with one column a group, as float32.
inline Tensor empty_rstd(const View& x, int64_t groups = 1) {
    std::vector<int64_t> sizes(x.sizes, x.sizes + x.dim);
    sizes.back() = groups;
    return empty(x.dim, sizes.data(), rmsnorm::contiguous_strides(x.dim, sizes.data()).data(),
                 ScalarType::Float);
}

inline float* floats(const Tensor& t) { return static_cast<float*>(t.data_ptr()); }

// Memory for floats, on the stack where they are few.
class Floats {
  public:
    explicit Floats(int64_t count) {
        if (count > inline_count) there_ = empty_vector(count, ScalarType::Float);
        data_ = count > inline_count ? floats(there_) : here_;
    }
    Floats(const Floats&) = delete;
    float* get() const { return data_; }

  private:
    static constexpr int64_t inline_count = 8192;
    alignas(64) float here_[inline_count];
    Tensor there_;
    float* data_;
};

// A result that is made where it is wanted.
using Result = std::optional<Tensor>;
inline Result tensor_of(const std::optional<View>& view) {
    return view ? Result(view->tensor) : std::nullopt;
}

// Refuses what functional.py may still allow: an `out` not known to be x itself or apart from all that is
// read.
inline void check_out(const View& out, Dtype dtype, const View& x,
                      std::initializer_list<const std::optional<View>*> others) {
    STD_TORCH_CHECK(out.shaped_as(x) && out.dtype == dtype, "out must have x's shape and the result's dtype");
    STD_TORCH_CHECK(x.adjacent() && out.adjacent(), "expected adjacent columns");
    STD_TORCH_CHECK(!rmsnorm::overlaps_itself(out.dim, out.sizes, out.strides),
                    "out must not overlap itself");
    STD_TORCH_CHECK(out.lies_as(x) || out.apart_from(x), "out must be x itself or lie apart from it");
    for (const std::optional<View>* other : others) {
        STD_TORCH_CHECK(!*other || (*other)->adjacent(), "expected adjacent columns");
        STD_TORCH_CHECK(!*other || out.apart_from(**other),
                        "out must lie apart from the gate and the weight");
    }
}

inline std::optional<View> view(const std::optional<Tensor>& t, const char* name) {
    return t ? std::optional<View>(std::in_place, *t, name) : std::nullopt;
}

}  // namespace
