// Hash and delta coding of one tensor in memory. The specification stands in fingerprint.py and delta.py; bits.cu is the same for a
// GPU, and every value is equal bit for bit. Addresses need no alignment. Nothing is allocated, nothing is checked but by bits_check.

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the specification is for little-endian bytes"
#endif

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

enum { BLOCK_BYTES = 16384, TOGETHER = 4, WORDS = 4096, SHIFT = 4, ROW_BYTES = 512, ROW_UNITS = 256, FULL = 255, NEAR = 8 };

static u64 fmix(u64 x) {
    x ^= x >> 33;
    x *= 0xFF51AFD7ED558CCDull;
    x ^= x >> 33;
    x *= 0xC4CEB9FE1A85EC53ull;
    return x ^ (x >> 33);
}

static u16 load16(const u8 *at) {
    u16 value;
    memcpy(&value, at, 2);
    return value;
}

static void store16(u8 *at, u16 value) { memcpy(at, &value, 2); }

// `absorb` takes NH of `count` blocks at once, so that a key is loaded once for all of them. With `ahead` it asks for the next ones:
// a processor's own reading ahead ends with each page. Where these bytes were just compared that would only be in the way.
#ifdef __AVX2__
static u64 across(__m256i x) {
    u64 lane[4];
    _mm256_storeu_si256((__m256i *)lane, x);
    return lane[0] + lane[1] + lane[2] + lane[3];
}

static inline __m256i product(__m256i words, __m256i keys) {
    __m256i keyed = _mm256_add_epi32(words, keys);
    return _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
}

static inline __attribute__((always_inline)) void absorb(const u8 *data, int count, int ahead, const u32 *keys, u64 out[][2]) {
    __m256i a[TOGETHER], b[TOGETHER];
    for (int i = 0; i < count; i++) a[i] = b[i] = _mm256_setzero_si256();
    for (int word = 0; word < WORDS; word += 8) {
        __m256i k = _mm256_loadu_si256((const __m256i *)(keys + word));
        __m256i l = _mm256_loadu_si256((const __m256i *)(keys + word + SHIFT));
        for (int i = 0; i < count; i++) {
            const u8 *at = data + i * (size_t)BLOCK_BYTES + 4 * word;
            if (ahead && word % 16 == 0) __builtin_prefetch(at + TOGETHER * BLOCK_BYTES);
            __m256i words = _mm256_loadu_si256((const __m256i *)at);
            a[i] = _mm256_add_epi64(a[i], product(words, k));
            b[i] = _mm256_add_epi64(b[i], product(words, l));
        }
    }
    for (int i = 0; i < count; i++) {
        out[i][0] = across(a[i]);
        out[i][1] = across(b[i]);
    }
}
#else
static void absorb(const u8 *data, int count, int ahead, const u32 *keys, u64 out[][2]) {
    (void)ahead;
    for (int block = 0; block < count; block++, data += BLOCK_BYTES) {
        u64 a = 0, b = 0;
        for (int i = 0; i < WORDS; i += 2) {
            u32 pair[2];
            memcpy(pair, data + 4 * i, 8);
            a += (u64)(u32)(pair[0] + keys[i]) * (u32)(pair[1] + keys[i + 1]);
            b += (u64)(u32)(pair[0] + keys[i + SHIFT]) * (u32)(pair[1] + keys[i + 1 + SHIFT]);
        }
        out[block][0] = a;
        out[block][1] = b;
    }
}
#endif

static void fold(u64 found[][2], int count, u64 block, u64 sums[2]) {
    for (int i = 0; i < count; i++) {
        sums[0] += fmix(found[i][0] + (block + i + 1) * 0x9E3779B97F4A7C15ull);
        sums[1] += fmix(found[i][1] + (block + i + 1) * 0xC2B2AE3D27D4EB4Full);
    }
}

// Adds the blocks of these bytes, of which the first has this position; the last one is padded with zeros.
static inline __attribute__((always_inline)) void add_blocks(
    const u8 *data, size_t nbytes, u64 block, int ahead, const u32 *keys, u64 sums[2]
) {
    u64 found[TOGETHER][2];
    for (; nbytes >= TOGETHER * BLOCK_BYTES; nbytes -= TOGETHER * BLOCK_BYTES, data += TOGETHER * BLOCK_BYTES, block += TOGETHER) {
        absorb(data, TOGETHER, ahead, keys, found);
        fold(found, TOGETHER, block, sums);
    }
    for (; nbytes >= BLOCK_BYTES; nbytes -= BLOCK_BYTES, data += BLOCK_BYTES, block++) {
        absorb(data, 1, 0, keys, found);
        fold(found, 1, block, sums);
    }
    if (nbytes) {
        u8 padded[BLOCK_BYTES] = {0};
        memcpy(padded, data, nbytes);
        absorb(padded, 1, 0, keys, found);
        fold(found, 1, block, sums);
    }
}

void bits_sums(const u8 *data, size_t nbytes, u64 first_block, const u32 *keys, u64 sums[2]) {
    add_blocks(data, nbytes, first_block, 1, keys, sums);
}

static size_t part(size_t nbytes, size_t at, size_t most) { return nbytes - at < most ? nbytes - at : most; }

// Which of the 32 units of 64 bytes differ.
static inline u32 differing(const u8 *current, const u8 *base) {
#ifdef __AVX2__
    const __m256i *c = (const __m256i *)current, *b = (const __m256i *)base;
    __m256i low = _mm256_cmpeq_epi16(_mm256_loadu_si256(c), _mm256_loadu_si256(b));
    __m256i high = _mm256_cmpeq_epi16(_mm256_loadu_si256(c + 1), _mm256_loadu_si256(b + 1));
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xD8);
    return ~(u32)_mm256_movemask_epi8(packed);
#else
    u32 mask = 0;
    if (memcmp(current, base, 64) == 0) return 0;
    for (int i = 0; i < 32; i++) mask |= (u32)(load16(current + 2 * i) != load16(base + 2 * i)) << i;
    return mask;
#endif
}

static inline u16 value_of(const u8 *current, const u8 *base, int unit, int overwrite) {
    u16 now = load16(current + 2 * unit);
    if (overwrite) return now;
    int16_t difference = (int16_t)(u16)(now - load16(base + 2 * unit));
    return (u16)(((u16)difference << 1) ^ (u16)(difference >> 15));
}

typedef struct {
    u8 *offsets;
    u16 *values;
    size_t entries, changed;
} Out;

// One row of 512 bytes, of which `units` belong to the tensor. Returns its count.
static inline u8 encode_row(const u8 *current, u8 *base, int units, int overwrite, Out *out) {
    u32 mask[8];
    int changed = 0;
    for (int i = 0; i < 8; i++) mask[i] = differing(current + 64 * i, base + 64 * i);
    for (int i = 0; i < 8; i++) changed += __builtin_popcount(mask[i]);
    if (!changed) return 0;
    u8 *offsets = out->offsets + out->entries;
    u16 *values = out->values + out->entries;
    out->changed += changed;
    if (changed >= FULL) {
        for (int i = 0; i < units; i++) {
            offsets[i] = (u8)i;
            values[i] = value_of(current, base, i, overwrite);
        }
        memcpy(base, current, ROW_BYTES);
        out->entries += units;
        return FULL;
    }
    for (int i = 0; i < 8; i++) {
        if (!mask[i]) continue;
        for (u32 left = mask[i]; left; left &= left - 1) {
            int unit = 32 * i + __builtin_ctz(left);
            *offsets++ = (u8)unit;
            *values++ = value_of(current, base, unit, overwrite);
        }
        memcpy(base + 64 * i, current + 64 * i, 64);
    }
    out->entries += changed;
    return (u8)changed;
}

// told: both sums, entries, changed units.
void bits_encode(
    const u8 *current, u8 *base, size_t nbytes, int overwrite, const u32 *keys, u8 *counts, u8 *offsets, u16 *values, u64 told[4]
) {
    Out out = {offsets, values, 0, 0};
    told[0] = told[1] = 0;
    for (size_t start = 0; start < nbytes; start += TOGETHER * BLOCK_BYTES) {
        size_t end = start + part(nbytes, start, TOGETHER * BLOCK_BYTES), at = start;
        for (; at + ROW_BYTES <= end; at += ROW_BYTES) *counts++ = encode_row(current + at, base + at, ROW_UNITS, overwrite, &out);
        if (at < end) {
            u8 now[ROW_BYTES] = {0}, old[ROW_BYTES] = {0};
            memcpy(now, current + at, end - at);
            memcpy(old, base + at, end - at);
            *counts++ = encode_row(now, old, (int)((end - at + 1) / 2), overwrite, &out);
            memcpy(base + at, now, end - at);
        }
        add_blocks(current + start, end - start, start / BLOCK_BYTES, 0, keys, told);  // these bytes are in the cache now
    }
    told[2] = out.entries;
    told[3] = out.changed;
}

static size_t units_at(size_t nbytes, size_t row) { return (part(nbytes, row * ROW_BYTES, ROW_BYTES) + 1) / 2; }

static size_t entries_of(u8 count, size_t nbytes, size_t row) { return count == FULL ? units_at(nbytes, row) : count; }

// Whether the planes fit each other and the tensor: what follows trusts them.
int bits_check(const u8 *counts, size_t rows, const u8 *offsets, size_t entries, size_t nbytes) {
    size_t used = 0;
    for (size_t row = 0; row < rows; row++) {
        size_t wanted = entries_of(counts[row], nbytes, row), units = units_at(nbytes, row);
        if (entries - used < wanted) return 0;
        for (size_t i = 0; i < wanted; i++)
            if (offsets[used + i] >= units || (i && offsets[used + i] <= offsets[used + i - 1])) return 0;
        used += wanted;
    }
    return used == entries;
}

static inline u16 merged(u16 held, u16 value, int sign) {
    if (!sign) return value;
    u16 difference = (u16)((value >> 1) ^ (0u - (value & 1u)));
    return (u16)(sign > 0 ? held + difference : held - difference);
}

static inline void write_unit(u8 *target, size_t nbytes, size_t unit, u16 value, int sign) {
    u8 *at = target + 2 * unit;
    if (2 * unit + 2 <= nbytes)
        store16(at, merged(load16(at), value, sign));
    else
        *at = (u8)merged(*at, value, sign);  // the last byte of an odd length
}

void bits_apply(u8 *target, size_t nbytes, const u8 *counts, const u8 *offsets, const u16 *values, int sign) {
    for (size_t row = 0; row * ROW_BYTES < nbytes; row++)
        for (size_t left = entries_of(counts[row], nbytes, row); left; left--)
            write_unit(target, nbytes, row * ROW_UNITS + *offsets++, *values++, sign);
}

void bits_apply_dense(u8 *target, size_t nbytes, const u8 *values, int sign) {
    for (size_t unit = 0; 2 * unit < nbytes; unit++) write_unit(target, nbytes, unit, load16(values + 2 * unit), sign);
}

void bits_to_bitmap(const u8 *counts, const u8 *offsets, size_t nbytes, u8 *bitmap) {
    for (size_t row = 0; row * ROW_BYTES < nbytes; row++)
        for (size_t left = entries_of(counts[row], nbytes, row); left; left--, offsets++)
            bitmap[row * (ROW_UNITS / 8) + *offsets / 8] |= (u8)(1u << (*offsets % 8));
}

// Ends a row with this many entries; 0 for 255 of its 256 units, which no encoder leaves.
static int close_row(u8 *counts, size_t row, size_t count, size_t nbytes) {
    counts[row] = (u8)(count < FULL ? count : FULL);
    return count < FULL || count == units_at(nbytes, row);
}

// -1: a bit past the end, or a row that no encoder leaves.
int64_t bits_from_bitmap(const u8 *bitmap, size_t nbytes, u8 *counts, u8 *offsets) {
    size_t entries = 0, units = (nbytes + 1) / 2, size = (units + 7) / 8;
    if (units % 8 && bitmap[size - 1] >> (units % 8)) return -1;
    for (size_t row = 0; row * ROW_BYTES < nbytes; row++) {
        size_t first = row * (ROW_UNITS / 8), count = 0;
        for (size_t byte = first; byte < size && byte < first + ROW_UNITS / 8; byte++)
            for (u32 left = bitmap[byte]; left; left &= left - 1, count++)
                offsets[entries + count] = (u8)(8 * (byte - first) + __builtin_ctz(left));
        if (!close_row(counts, row, count, nbytes)) return -1;
        entries += count;
    }
    return (int64_t)entries;
}

// How many units lie between entries: a byte below 255 ends an entry, 255 adds as many. Returns the bytes written; there is room
// for NEAR more. Only a row's first entry can be 255 or more units after another; for the others a fixed length is faster.
size_t bits_to_gaps(const u8 *restrict counts, const u8 *restrict offsets, size_t entries, size_t nbytes, u8 *restrict gaps) {
    u8 *restrict out = gaps;
    const u8 *end = offsets + entries;
    size_t next = 0;
    for (size_t row = 0; row * ROW_BYTES < nbytes; row++) {
        size_t count = entries_of(counts[row], nbytes, row);
        if (!count) continue;
        size_t gap = row * ROW_UNITS + offsets[0] - next;
        for (; gap >= 255; gap -= 255) *out++ = 255;
        out[0] = (u8)gap;
        if (count <= NEAR && (size_t)(end - offsets) > NEAR)
            for (int i = 1; i <= NEAR; i++) out[i] = (u8)(offsets[i] - offsets[i - 1] - 1);
        else
            for (size_t i = 1; i < count; i++) out[i] = (u8)(offsets[i] - offsets[i - 1] - 1);
        next = row * ROW_UNITS + offsets[count - 1] + 1;
        out += count;
        offsets += count;
    }
    return (size_t)(out - gaps);
}

// The counts are zero before. -1: past the end, an entry without its end, or a row that no encoder leaves.
int64_t bits_from_gaps(const u8 *gaps, size_t size, size_t nbytes, u8 *counts, u8 *offsets) {
    size_t entries = 0, units = (nbytes + 1) / 2, next = 0, row = 0, count = 0;
    for (size_t i = 0; i < size; i++) {
        next += gaps[i];
        if (gaps[i] == 255) continue;
        if (next >= units) return -1;
        if (next / ROW_UNITS != row) {
            if (!close_row(counts, row, count, nbytes)) return -1;
            row = next / ROW_UNITS;
            count = 0;
        }
        offsets[entries++] = (u8)(next++ % ROW_UNITS);
        count++;
    }
    if (size && (gaps[size - 1] == 255 || !close_row(counts, row, count, nbytes))) return -1;
    return (int64_t)entries;
}

void bits_to_dense(const u8 *counts, const u8 *offsets, const u16 *values, size_t nbytes, u8 *dense) {
    for (size_t row = 0; row * ROW_BYTES < nbytes; row++)
        for (size_t left = entries_of(counts[row], nbytes, row); left; left--)
            store16(dense + 2 * (row * ROW_UNITS + *offsets++), *values++);
}
