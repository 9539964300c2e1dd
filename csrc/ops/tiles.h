// Rows whose columns are not adjacent, as the channels of images: they go through memory where they are, some
// rows at a time, in a cache.
#pragma once

#include "tensors.h"

namespace {

// to[r][c] = from[r][c] for any strides, in blocks that use the cache lines of both.
template <class Element>
void move_block(const char* from_bytes, int64_t from_row, int64_t from_col, char* to_bytes, int64_t to_row,
                int64_t to_col, int64_t rows, int64_t cols) {
    const Element* from = reinterpret_cast<const Element*>(from_bytes);
    Element* to = reinterpret_cast<Element*>(to_bytes);
    constexpr int64_t block = 16;
    for (int64_t r0 = 0; r0 < rows; r0 += block)
        for (int64_t c0 = 0; c0 < cols; c0 += block) {
            const int64_t r1 = std::min(rows, r0 + block), c1 = std::min(cols, c0 + block);
            for (int64_t c = c0; c < c1; ++c)
                for (int64_t r = r0; r < r1; ++r)
                    to[r * to_row + c * to_col] = from[r * from_row + c * from_col];
        }
}

inline void move(const Rows& from, int64_t from_col, const Rows& to, int64_t to_col, int64_t rows,
                 int64_t cols) {
    auto moved = rmsnorm::size_of(from.dtype) == 4 ? move_block<uint32_t> : move_block<uint16_t>;
    moved(static_cast<const char*>(from.data), from.stride, from_col, static_cast<char*>(to.data), to.stride,
          to_col, rows, cols);
}

// Some rows that lie a fixed stride apart in each tensor.
class Tile {
  public:
    Tile(const Layout::Run& run, int64_t cols, float* memory, int64_t slot_floats)
        : run_(run), cols_(cols), memory_(memory), slot_floats_(slot_floats) {}
    const Layout::Run& run() const { return run_; }

    // The rows of the tensor that is `which` of the layout, with adjacent columns.
    Rows read(const View& view, int which) {
        const Rows there = view.rows(run_, which);
        if (view.adjacent()) return there;
        const Rows here = slot(view.dtype);
        move(there, view.strides[view.dim - 1], here, 1, run_.rows, cols_);
        return here;
    }
    // Where to write them.
    Rows write(const View& view, int which) {
        const Rows there = view.rows(run_, which);
        if (view.adjacent()) return there;
        const Rows here = slot(view.dtype);
        written_[count_++] = {here, there, view.strides[view.dim - 1]};
        return here;
    }
    void finish() const {
        for (int i = 0; i < count_; ++i)
            move(written_[i].here, 1, written_[i].there, written_[i].col_stride, run_.rows, cols_);
    }

  private:
    // A stride of whole cache lines and one more, so that rows do not compete for one place in the cache.
    Rows slot(Dtype dtype) {
        const int64_t stride = (cols_ + 15) / 16 * 16 + 16;
        return {memory_ + slots_++ * slot_floats_, stride, dtype, true};
    }

    struct Written {
        Rows here, there;
        int64_t col_stride;
    };
    Layout::Run run_;
    int64_t cols_;
    float* memory_;
    int64_t slot_floats_;
    int slots_ = 0, count_ = 0;
    Written written_[2];
};

// How tensors are walked: in runs where all have adjacent columns, and else in tiles.
class Tiles {
  public:
    Tiles(int64_t rows, int64_t cols, std::initializer_list<const View*> views) : cols_(cols) {
        for (const View* view : views) slots_ += !view->adjacent();
        if (!slots_) return;
        rows_ = std::min(rows, std::max<int64_t>(16, std::min<int64_t>(64, 32768 / cols)));
        slot_floats_ = rows_ * (cols + 32);
    }
    // The memory that a thread needs for them.
    int64_t floats() const { return slots_ * slot_floats_; }

    template <class Visit>
    void for_each(const Layout& layout, int64_t begin, int64_t end, float* memory, Visit visit) const {
        layout.for_each_run(begin, end, [&](const Layout::Run& run) {
            const int64_t step = slots_ ? rows_ : run.rows;
            for (int64_t first = 0; first < run.rows; first += step) {
                Layout::Run part = run;
                part.first += first;
                part.rows = std::min(step, run.rows - first);
                for (int t = 0; t < Layout::tensors; ++t) part.offset[t] += first * run.stride[t];
                Tile tile(part, cols_, memory, slot_floats_);
                visit(tile);
                tile.finish();
            }
        });
    }

  private:
    int64_t cols_, rows_ = 0, slots_ = 0, slot_floats_ = 0;
};

}  // namespace
