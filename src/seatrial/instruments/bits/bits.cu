// Hash and delta coding of many tensors in one launch, for NVRTC. The specification stands in fingerprint.py and delta.py; bits.c is
// the same for a CPU, and every value is equal bit for bit.
//
// One warp works on one tile (16 KiB = 32 rows of 512 bytes): a row is one 16-byte load per lane. A tile is both the block of the
// hash and the unit of compaction, so that one read of the weights serves both. Nothing here is atomic: results do not depend on
// the order in which tiles run.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define ROWS 32
#define ROW_BYTES 512
#define TILE_BYTES (ROWS * ROW_BYTES)
#define ROW_UNITS 256
#define KEYS 1025 /* of 16 bytes: 4096 words and the shift by 4 of the second sum */
#define ALL 0xffffffffu
#define NONE 0xffffffffu
// Given to the compiler (see gpu.py): THREADS per block; UNROLL, rows that are loaded before the first is looked at; QUEUE, pieces
// of 16 bytes that wait in a warp; AHEAD, entries per lane that are applied together.

// A tensor. The table of them ends with an entry that holds only first_tile.
struct Piece {
    u8 *current; // what is read, or what a delta is applied to
    u8 *base;
    u64 nbytes;
    u64 first_tile;
};

__device__ __forceinline__ u64 fmix(u64 x) {
    x ^= x >> 33; x *= 0xFF51AFD7ED558CCDull; x ^= x >> 33; x *= 0xC4CEB9FE1A85EC53ull;
    return x ^ (x >> 33);
}

template <class T> __device__ __forceinline__ T warp_sum(T x) {
    for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(ALL, x, step);
    return x;
}

// 16 bytes at `at`; what lies past the end of the tensor is zero and is not read. Rare, so it is kept out of the hot loops.
__device__ __noinline__ uint4 load_guarded(const u8 *bytes, u64 at, u64 nbytes) {
    if (at + 16 <= nbytes) return *(const uint4 *)(bytes + at);
    u32 word[4] = {0, 0, 0, 0};
    for (int i = 0; i < 16; i++)
        if (at + i < nbytes) word[i / 4] |= (u32)bytes[at + i] << (8 * (i % 4));
    return make_uint4(word[0], word[1], word[2], word[3]);
}

__device__ __noinline__ void store_edge(u8 *bytes, u64 at, u64 nbytes, uint4 value) {
    u32 word[4] = {value.x, value.y, value.z, value.w};
    for (int i = 0; i < 16; i++)
        if (at + i < nbytes) bytes[at + i] = (u8)(word[i / 4] >> (8 * (i % 4)));
}

__device__ __forceinline__ void store_guarded(u8 *bytes, u64 at, u64 nbytes, uint4 value) {
    if (at + 16 <= nbytes) *(uint4 *)(bytes + at) = value;
    else store_edge(bytes, at, nbytes, value);
}

__device__ __forceinline__ void absorb(uint4 data, uint4 k, uint4 l, u64 &a, u64 &b) {
    a += (u64)(data.x + k.x) * (data.y + k.y);
    b += (u64)(data.x + l.x) * (data.y + l.y);
    a += (u64)(data.z + k.z) * (data.w + k.w);
    b += (u64)(data.z + l.z) * (data.w + l.w);
}

__device__ __forceinline__ void finish(u64 a, u64 b, u64 block, int lane, ulonglong2 *out) {
    a = warp_sum(a);
    b = warp_sum(b);
    if (lane == 0) {
        a = fmix(a + (block + 1) * 0x9E3779B97F4A7C15ull);
        b = fmix(b + (block + 1) * 0xC2B2AE3D27D4EB4Full);
        *out = make_ulonglong2(a, b);
    }
}

__device__ __forceinline__ void load_keys(uint4 *keys, const uint4 *table) {
    for (int i = threadIdx.x; i < KEYS; i += blockDim.x) keys[i] = table[i];
    __syncthreads();
}

__device__ __forceinline__ int piece_of(const Piece *pieces, u64 tile, int piece) {
    while (tile >= pieces[piece + 1].first_tile) piece++;
    return piece;
}

// The two sums of every tile.
extern "C" __global__ void hash_tiles(const Piece *pieces, u64 tiles, const uint4 *table, ulonglong2 *sums) {
    __shared__ uint4 keys[KEYS];
    load_keys(keys, table);
    int lane = threadIdx.x & 31, piece = 0;
    u64 warps = (u64)gridDim.x * (blockDim.x >> 5);
    for (u64 tile = blockIdx.x * (u64)(blockDim.x >> 5) + (threadIdx.x >> 5); tile < tiles; tile += warps) {
        piece = piece_of(pieces, tile, piece);
        const u8 *bytes = pieces[piece].current;
        u64 nbytes = pieces[piece].nbytes, block = tile - pieces[piece].first_tile, at = block * TILE_BYTES + lane * 16;
        u64 a = 0, b = 0;
        if ((block + 1) * TILE_BYTES <= nbytes) {
            const uint4 *data = (const uint4 *)(bytes + at);
#pragma unroll 1
            for (int row = 0; row < ROWS; row += 8) {
                uint4 held[8];
#pragma unroll
                for (int i = 0; i < 8; i++) held[i] = __ldcs(data + (row + i) * 32);
#pragma unroll
                for (int i = 0; i < 8; i++) absorb(held[i], keys[(row + i) * 32 + lane], keys[(row + i) * 32 + lane + 1], a, b);
            }
        } else {
            for (int row = 0; row < ROWS; row++)
                absorb(load_guarded(bytes, at + row * ROW_BYTES, nbytes), keys[row * 32 + lane], keys[row * 32 + lane + 1], a, b);
        }
        finish(a, b, block, lane, sums + tile);
    }
}

// One block per tensor: sums of its tiles, and the totals of an encoding.
extern "C" __global__ void fold_tiles(const Piece *pieces, const ulonglong2 *sums, const u32 *entries, const u32 *changed, u64 *out) {
    __shared__ u64 part[4][32];
    u64 total[4] = {0, 0, 0, 0};
    for (u64 tile = pieces[blockIdx.x].first_tile + threadIdx.x; tile < pieces[blockIdx.x + 1].first_tile; tile += blockDim.x) {
        ulonglong2 pair = sums[tile];
        total[0] += pair.x;
        total[1] += pair.y;
        if (entries) { total[2] += entries[tile]; total[3] += changed[tile]; }
    }
    for (int i = 0; i < 4; i++) {
        u64 sum = warp_sum(total[i]);
        if ((threadIdx.x & 31) == 0) part[i][threadIdx.x >> 5] = sum;
    }
    __syncthreads();
    if (threadIdx.x < 4) {
        u64 sum = 0;
        for (int i = 0; i < blockDim.x >> 5; i++) sum += part[threadIdx.x][i];
        out[blockIdx.x * 4 + threadIdx.x] = sum;
    }
}

__device__ __forceinline__ u32 unit_mask(uint4 x) {
    u32 mask = 0;
    mask |= (x.x & 0xffffu ? 1u : 0u) | (x.x >> 16 ? 2u : 0u) | (x.y & 0xffffu ? 4u : 0u) | (x.y >> 16 ? 8u : 0u);
    mask |= (x.z & 0xffffu ? 16u : 0u) | (x.z >> 16 ? 32u : 0u) | (x.w & 0xffffu ? 64u : 0u) | (x.w >> 16 ? 128u : 0u);
    return mask;
}

__device__ __forceinline__ u32 unit_of(uint4 x, int i) {
    u32 low = i & 2 ? x.y : x.x, high = i & 2 ? x.w : x.z, word = i & 4 ? high : low;
    return i & 1 ? word >> 16 : word & 0xffffu;
}

__device__ __forceinline__ u16 zigzag(u32 difference) {
    short value = (short)difference;
    return (u16)((value << 1) ^ (value >> 15));
}

// Where a tile stands while it is encoded.
struct Tile {
    u32 entries;  // written to its slots
    u32 changed;  // units that differ, also of rows that found no room
    u32 count;    // of the row with this lane's number
    bool full;    // some rows found no room: they and all after them are left for a second pass
};

// Pieces of 16 bytes that differ, gathered from several rows: they are few, and one warp then works on 32 of them at a time.
struct Queue {
    uint4 current[QUEUE];
    uint4 base[QUEUE];
    u16 place[QUEUE]; // row * 32 + lane
    u32 rows[ROWS];   // units that differ, per row
};

__device__ __forceinline__ uint4 differences(uint4 a, uint4 b) { return make_uint4(a.x ^ b.x, a.y ^ b.y, a.z ^ b.z, a.w ^ b.w); }

__device__ __forceinline__ u32 units_from(u64 at, u64 nbytes, u32 most) {
    u64 units = at < nbytes ? (nbytes - at + 1) / 2 : 0;
    return units < most ? (u32)units : most;
}

// Entries of the queued pieces into the slots of the tile, and the base refreshed.
__device__ __forceinline__ void flush(
    Queue &queue, u32 queued, u8 *base, u64 tile_at, u64 nbytes, int lane, bool overwrite, u32 capacity, u8 *offsets, u16 *values, Tile &tile
) {
    u32 differing = 0;
    queue.rows[lane] = 0;
    __syncwarp();
    for (u32 i = lane; i < queued; i += 32) {
        u32 n = __popc(unit_mask(differences(queue.current[i], queue.base[i])));
        atomicAdd(&queue.rows[queue.place[i] >> 5], n);
        differing += n;
    }
    tile.changed += warp_sum(differing);
    __syncwarp();
    // A row with 255 changed units or more is stored whole: its count need not tell 255 from 256.
    u32 own = queue.rows[lane];
    bool whole = own >= 255;
    u32 all = units_from(tile_at + lane * ROW_BYTES, nbytes, ROW_UNITS), total = warp_sum(whole ? all : own);
    if (tile.full || tile.entries + total > capacity) {
        for (u32 i = lane; i < queued && !tile.full; i += 32) store_guarded(base, tile_at + queue.place[i] * 16, nbytes, queue.base[i]);
        tile.full = true;
        return;
    }
    if (own) tile.count = whole ? 255 : own;
    u32 slot = tile.entries, before = (1u << lane) - 1;
    tile.entries += total;
    for (u32 from = 0; from < queued; from += 32) {
        u32 i = from + lane, place = 0, mask = 0;
        uint4 now = {0, 0, 0, 0}, old = {0, 0, 0, 0};
        if (i < queued) {
            now = queue.current[i], old = queue.base[i], place = queue.place[i];
            mask = unit_mask(differences(now, old));
            if (queue.rows[place >> 5] >= 255) mask = (1u << units_from(tile_at + place * 16, nbytes, 8)) - 1;
        }
        u32 n = __popc(mask);
        u32 b0 = __ballot_sync(ALL, n & 1), b1 = __ballot_sync(ALL, n & 2), b2 = __ballot_sync(ALL, n & 4), b3 = __ballot_sync(ALL, n & 8);
        u32 next = slot + __popc(b0 & before) + 2 * __popc(b1 & before) + 4 * __popc(b2 & before) + 8 * __popc(b3 & before);
        slot += __popc(b0) + 2 * __popc(b1) + 4 * __popc(b2) + 8 * __popc(b3);
        while (mask) {
            int unit = __ffs(mask) - 1;
            mask &= mask - 1;
            u32 value = unit_of(now, unit);
            offsets[next] = (u8)((place & 31) * 8 + unit);
            values[next] = overwrite ? (u16)value : zigzag(value - unit_of(old, unit));
            next++;
        }
    }
}

// A row's differing pieces into the queue, and the base refreshed; returns how many are in the queue now. The base is written in
// whole runs of 64 bytes, what memory reads and writes at once: half of one would have to be read again before it is written.
__device__ __forceinline__ u32 enqueue(Queue &queue, u32 queued, uint4 now, uint4 old, int row, int lane, u8 *base, u64 at, u64 nbytes, bool full) {
    uint4 x = differences(now, old);
    bool differs = (x.x | x.y | x.z | x.w) != 0;
    u32 who = __ballot_sync(ALL, differs);
    if (!full && (who >> (lane & 28)) & 15) store_guarded(base, at, nbytes, now);
    if (differs) {
        u32 at = queued + __popc(who & ((1u << lane) - 1));
        queue.current[at] = now;
        queue.base[at] = old;
        queue.place[at] = (u16)(row * 32 + lane);
    }
    return queued + __popc(who);
}

// Encode: compare, compact into the tile's slots, refresh the base, hash. With `list` only those tiles, their slots by position,
// counts added to those of the first pass.
extern "C" __global__ void __launch_bounds__(THREADS) encode_tiles(
    const Piece *pieces, u64 tiles, const uint4 *table, const u32 *list, int overwrite, u32 capacity,
    u8 *counts, u8 *slot_offsets, u16 *slot_values, u32 *entries, u32 *changed, u32 *full, ulonglong2 *sums
) {
    extern __shared__ uint4 shared[];
    uint4 *keys = shared;
    load_keys(keys, table);
    Queue &queue = ((Queue *)(shared + KEYS))[threadIdx.x >> 5];
    int lane = threadIdx.x & 31, piece = 0;
    u64 warps = (u64)gridDim.x * (THREADS / 32);
    for (u64 item = blockIdx.x * (u64)(THREADS / 32) + (threadIdx.x >> 5); item < tiles; item += warps) {
        u64 index = list ? list[item] : item;
        piece = piece_of(pieces, index, piece);
        const u8 *current = pieces[piece].current;
        u8 *base = pieces[piece].base, *offsets = slot_offsets + item * capacity;
        u16 *values = slot_values + item * capacity;
        u64 nbytes = pieces[piece].nbytes, block = index - pieces[piece].first_tile, tile_at = block * TILE_BYTES, at = tile_at + lane * 16;
        bool inside = tile_at + TILE_BYTES <= nbytes;
        const uint4 *now = (const uint4 *)(current + at), *old = (const uint4 *)(base + at);
        u64 a = 0, b = 0;
        u32 queued = 0;
        Tile tile = {0, 0, list ? counts[index * ROWS + lane] : 0u, false};
        uint4 c[2][UNROLL], o[2][UNROLL];
        auto fetch = [&](int row, uint4 *c, uint4 *o) {
#pragma unroll
            for (int i = 0; i < UNROLL; i++) {
                u64 place = at + (row + i) * ROW_BYTES;
                c[i] = inside ? __ldcs(now + (row + i) * 32) : load_guarded(current, place, nbytes);
                o[i] = inside ? __ldcs(old + (row + i) * 32) : load_guarded(base, place, nbytes);
            }
        };
        fetch(0, c[0], o[0]);
#pragma unroll 1
        for (int pair = 0; pair < ROWS; pair += 2 * UNROLL) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int row = pair + half * UNROLL;
                // The next rows are on their way while these are looked at.
                if (row + UNROLL < ROWS) fetch(row + UNROLL, c[1 - half], o[1 - half]);
#pragma unroll
                for (int i = 0; i < UNROLL; i++) {
                    absorb(c[half][i], keys[(row + i) * 32 + lane], keys[(row + i) * 32 + lane + 1], a, b);
                    queued = enqueue(queue, queued, c[half][i], o[half][i], row + i, lane, base, at + (row + i) * ROW_BYTES, nbytes, tile.full);
                }
            }
            if (queued > QUEUE - 64 * UNROLL || (pair + 2 * UNROLL == ROWS && queued)) {
                __syncwarp();
                flush(queue, queued, base, tile_at, nbytes, lane, overwrite, capacity, offsets, values, tile);
                __syncwarp();
                queued = 0;
            }
        }
        counts[index * ROWS + lane] = (u8)tile.count;
        if (lane == 0) {
            entries[item] = tile.entries;
            if (!list) changed[item] = tile.changed;
            full[item] = tile.full;
        }
        finish(a, b, block, lane, sums + index);
    }
}

// Slots to planes: tile `list[i]` (or i) writes its entries at first[i].
extern "C" __global__ void compact_tiles(
    u64 tiles, u32 capacity, const u8 *slot_offsets, const u16 *slot_values, const u32 *entries, const u64 *first, u8 *offsets, u16 *values
) {
    int lane = threadIdx.x & 31;
    u64 warps = (u64)gridDim.x * (blockDim.x >> 5);
    for (u64 tile = blockIdx.x * (u64)(blockDim.x >> 5) + (threadIdx.x >> 5); tile < tiles; tile += warps) {
        u32 n = entries[tile];
        u64 to = first[tile], from = tile * capacity;
        for (u32 i = lane; i < n; i += 32) {
            offsets[to + i] = slot_offsets[from + i];
            values[to + i] = slot_values[from + i];
        }
    }
}

__device__ __forceinline__ u32 entries_of(u32 count, u64 row, u64 nbytes) {
    return count < 255 ? count : units_from(row * ROW_BYTES, nbytes, ROW_UNITS);
}

// How many entries each tile has, from the counts of its rows.
extern "C" __global__ void count_tiles(const Piece *pieces, u64 tiles, const uint4 *counts, u32 *entries) {
    int piece = 0;
    for (u64 tile = blockIdx.x * (u64)blockDim.x + threadIdx.x; tile < tiles; tile += (u64)gridDim.x * blockDim.x) {
        uint4 one = counts[tile * 2], two = counts[tile * 2 + 1];
        u32 words[8] = {one.x, one.y, one.z, one.w, two.x, two.y, two.z, two.w}, total = 0, whole = 0;
        for (int i = 0; i < 8; i++) {
            total += __vsadu4(words[i], 0);
            whole |= __vcmpeq4(words[i], 0xffffffffu);
        }
        if (whole) {
            piece = piece_of(pieces, tile, piece);
            u64 nbytes = pieces[piece].nbytes, row = (tile - pieces[piece].first_tile) * ROWS;
            total = 0;
            for (int i = 0; i < ROWS; i++) total += entries_of(words[i / 4] >> (8 * (i % 4)) & 255, row + i, nbytes);
        }
        entries[tile] = total;
    }
}

// Add to a unit, mod 2^16. Done where the memory is, by adding to the word around it: a load, an addition and a store would fetch
// the unit and write it back later, which costs a fifth more. What a lower unit carries into the upper one is taken back.
__device__ __forceinline__ void add_to_unit(u8 *bytes, u64 at, u64 nbytes, u32 difference) {
    if ((at | 3) >= nbytes) {  // the word is not whole: its last units, or the last byte of an odd length, stand alone
        if (at + 2 > nbytes) bytes[at] += (u8)difference;
        else *(u16 *)(bytes + at) += (u16)difference;
        return;
    }
    u32 *word = (u32 *)(bytes + (at & ~3ull));
    if (at & 2) {
        atomicAdd(word, difference << 16);
        return;
    }
    int step = (short)difference;
    int sum = (int)(atomicAdd(word, (u32)step) & 0xffffu) + step;
    if (sum < 0) atomicAdd(word, 0x10000u);
    else if (sum > 0xffff) atomicAdd(word, 0xffff0000u);
}

__device__ __forceinline__ void set_unit(u8 *bytes, u64 at, u64 nbytes, u32 value) {
    if (at + 2 > nbytes) bytes[at] = (u8)value;
    else *(u16 *)(bytes + at) = (u16)value;
}

// What one lane knows of a tile before its entries are applied.
struct Ahead {
    u64 start; // where its entries begin
    u32 n, count;
    u32 offset[AHEAD], value[AHEAD];
};

__device__ __forceinline__ void load_entries(const u8 *offsets, const u16 *values, u32 from, int lane, Ahead &next) {
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
        u32 i = from + k * 32 + lane;
        if (i < next.n) {
            next.offset[k] = offsets[next.start + i];
            next.value[k] = values[next.start + i];
        }
    }
}

// Apply planes to tensors in place: add (0), subtract (1) or overwrite (2). The planes of all tensors are three arrays, the counts
// 32 per tile; `starts[t]` is where the entries of tile t begin. Nothing happens if `wrong` is set. The planes of a tile are on their
// way while the tile before is worked on. With `crowded`, a load and a store per unit are cheaper than adding in memory.
extern "C" __global__ void __launch_bounds__(THREADS) apply_tiles(
    const Piece *pieces, u64 tiles, const u8 *counts, const u8 *offsets, const u16 *values, const u64 *starts, int operation, int crowded,
    const u32 *wrong
) {
    int lane = threadIdx.x & 31, piece = 0;
    u64 warps = (u64)gridDim.x * (THREADS / 32), tile = blockIdx.x * (u64)(THREADS / 32) + (threadIdx.x >> 5);
    if (tile >= tiles || *wrong) return;
    Ahead now, next;
    auto head = [&](u64 tile, Ahead &ahead) {
        ahead.start = starts[tile];
        ahead.n = (u32)(starts[tile + 1] - ahead.start);
        ahead.count = counts[tile * ROWS + lane];
    };
    head(tile, now);
    load_entries(offsets, values, 0, lane, now);
    while (tile < tiles) {
        u64 later = tile + warps;
        if (later < tiles) head(later, next);
        piece = piece_of(pieces, tile, piece);
        u8 *bytes = pieces[piece].current;
        u64 nbytes = pieces[piece].nbytes, block = tile - pieces[piece].first_tile, tile_at = block * TILE_BYTES;
        u32 end = entries_of(now.count, block * ROWS + lane, nbytes);
        for (int step = 1; step < 32; step <<= 1) {
            u32 other = __shfl_up_sync(ALL, end, step);
            if (lane >= step) end += other;
        }
        for (u32 from = 0; from < now.n || from == 0; from += 32 * AHEAD) {
            u64 at[AHEAD];
            u32 held[AHEAD];
            if (from) load_entries(offsets, values, from, lane, now);
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                u32 i = from + k * 32 + lane, row = 0;  // how many rows end at or before entry i
#pragma unroll
                for (int step = 16; step; step >>= 1) {
                    u32 edge = __shfl_sync(ALL, end, row + step - 1);
                    if (edge <= i) row += step;
                }
                at[k] = i < now.n ? tile_at + (row * ROW_UNITS + now.offset[k]) * 2 : nbytes;
                if (crowded && at[k] + 2 <= nbytes) held[k] = *(const u16 *)(bytes + at[k]);
            }
            if (!from && later < tiles) load_entries(offsets, values, 0, lane, next);
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                if (at[k] >= nbytes) continue;
                u32 difference = (now.value[k] >> 1) ^ (0u - (now.value[k] & 1));
                if (operation == 1) difference = 0u - difference;
                if (operation == 2) set_unit(bytes, at[k], nbytes, now.value[k]);
                else if (crowded && at[k] + 2 <= nbytes) set_unit(bytes, at[k], nbytes, held[k] + difference);
                else add_to_unit(bytes, at[k], nbytes, difference);
            }
        }
        now = next;
        tile = later;
    }
}
