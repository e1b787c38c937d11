// AMX for processors without it: preloaded, it permits AMX and does what its instructions would, one signal each.
//
// So tests run the very machine code that processors with AMX run, some ten thousand times slower. AMX_EMULATOR=refuses
// in the environment permits nothing, AMX_EMULATOR=dies permits and does nothing.
//
// It works on processors with AMX as well: Linux was never asked there, so whatever touches a register's contents is
// illegal all the same. LDTILECFG and TILERELEASE aren't; what they did is told by the state that Linux has saved.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, the instructions' operation; volume 1,
// 13.4 (layout of the saved state) and 13.14 (what is illegal while XFD is set).
#include <cpuid.h>
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <sys/syscall.h>
#include <ucontext.h>

#include <atomic>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace {

struct Register {
    uint8_t bytes[16][64];
    int rows = 0, row_bytes = 0;  // 0: not configured
};
thread_local Register registers[8];
std::atomic<int64_t> num_products{0};

template <class T>
T element(const Register& from, int row, int i) {
    T value;
    memcpy(&value, &from.bytes[row][i * sizeof(T)], sizeof value);
    return value;
}
template <class T>
void set_element(Register& to, int row, int i, T value) {
    memcpy(&to.bytes[row][i * sizeof(T)], &value, sizeof value);
}

// Whether it is a configuration that the processor would take.
bool configure(const uint8_t* p) {
    bool is_good = p[0] == 1 && p[1] == 0;
    for (int i = 0; i < 16; i++) {
        uint16_t row_bytes;
        memcpy(&row_bytes, p + 16 + 2 * i, sizeof row_bytes);
        int rows = p[48 + i];
        if (i < 8) {
            registers[i] = Register{{}, rows, row_bytes};
            is_good &= rows <= 16 && row_bytes <= 64 && (rows == 0) == (row_bytes == 0);
        } else {
            is_good &= rows == 0 && row_bytes == 0;
        }
        if (i >= 2) is_good &= p[i] == 0;
    }
    return is_good;
}

// Where the configuration lies in the saved state; 0 on processors without AMX.
int64_t find_configuration() {
    constexpr unsigned AMX_TILE = 1u << 24, STATES = 0xd, XTILECFG = 17;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & AMX_TILE)) return 0;
    return __get_cpuid_count(STATES, XTILECFG, &a, &b, &c, &d) ? b : 0;
}

// Take over what the processor itself has configured since.
void follow_processor(const ucontext_t* context) {
    static const int64_t offset = find_configuration();
    constexpr int64_t HEADER = 512;
    constexpr uint64_t HAS_CONFIGURATION = 1 << 17;
    const uint8_t* saved = (const uint8_t*)context->uc_mcontext.fpregs;
    if (!offset || !saved) return;
    thread_local uint8_t last[64];
    uint8_t now[64] = {};
    uint64_t parts;
    memcpy(&parts, saved + HEADER, sizeof parts);
    if (parts & HAS_CONFIGURATION) memcpy(now, saved + offset, sizeof now);
    if (memcmp(last, now, sizeof now) == 0) return;
    memcpy(last, now, sizeof now);
    now[0] ? (void)configure(now) : (void)memset(registers, 0, sizeof registers);
}

void load(Register& to, const uint8_t* start, int64_t stride) {
    memset(to.bytes, 0, sizeof to.bytes);
    for (int row = 0; row < to.rows; row++) memcpy(to.bytes[row], start + row * stride, to.row_bytes);
}
void store(const Register& from, uint8_t* start, int64_t stride) {
    for (int row = 0; row < from.rows; row++) memcpy(start + row * stride, from.bytes[row], from.row_bytes);
}

float flushed(float x) { return std::abs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x; }
float widened(uint16_t bfloat16) {
    uint32_t bits = (uint32_t)bfloat16 << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return flushed(value);
}

// Even and odd inputs by themselves, each with a rounding a product, then both, then the sum that there was.
void add_bf16(Register& sums, const Register& a, const Register& b) {
    for (int m = 0; m < sums.rows; m++)
        for (int n = 0; n < sums.row_bytes / 4; n++) {
            float parts[2] = {};
            for (int k = 0; k < a.row_bytes / 4; k++)
                for (int i = 0; i < 2; i++)
                    parts[i] = flushed(std::fma(widened(element<uint16_t>(a, m, 2 * k + i)),
                                                widened(element<uint16_t>(b, k, 2 * n + i)), parts[i]));
            set_element(sums, m, n, flushed(flushed(element<float>(sums, m, n)) + flushed(parts[0] + parts[1])));
        }
}

// Bytes from zero on, times bytes with a sign.
void add_bytes(Register& sums, const Register& a, const Register& b) {
    for (int m = 0; m < sums.rows; m++)
        for (int n = 0; n < sums.row_bytes / 4; n++) {
            uint32_t total = element<uint32_t>(sums, m, n);
            for (int k = 0; k < a.row_bytes / 4; k++)
                for (int i = 0; i < 4; i++)
                    total += (uint32_t)(element<uint8_t>(a, m, 4 * k + i) * element<int8_t>(b, k, 4 * n + i));
            set_element(sums, m, n, total);
        }
}

bool fit(const Register& sums, const Register& a, const Register& b) {
    num_products++;
    return sums.rows > 0 && sums.rows == a.rows && sums.row_bytes == b.row_bytes && b.rows > 0 &&
           a.row_bytes == 4 * b.rows;
}

int64_t value_of(const ucontext_t* context, int number) {
    static const int order[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return context->uc_mcontext.gregs[order[number]];
}

// A prefix of three bytes, C4 RXBmmmmm WvvvvLpp, then opcode, ModRM, SIB and an offset. False: not one of AMX's, or one
// that the processor would refuse.
bool execute(const uint8_t* code, ucontext_t* context, int& length) {
    if (code[0] != 0xc4 || (code[1] & 31) != 2 || (code[2] & 0x84) != 0) return false;
    const int prefix = code[2] & 3, opcode = code[3], mod = code[4] >> 6, reg = code[4] >> 3 & 7, rm = code[4] & 7;
    const int third = ~code[2] >> 3 & 15;
    length = 5;
    uint8_t* start = nullptr;
    int64_t stride = 0;
    if (mod != 3) {
        int base = rm;
        if (rm == 4) {
            const int index = (code[5] >> 3 & 7) | (code[1] & 0x40 ? 0 : 8);
            base = code[5] & 7;
            length++;
            if (index != 4) stride = value_of(context, index) << (code[5] >> 6);
        }
        if (mod == 0 && base == 5) return false;  // without a base: nobody writes that
        start = (uint8_t*)value_of(context, base | (code[1] & 0x20 ? 0 : 8));
        if (mod == 1) start += (int8_t)code[length++];
        if (mod == 2) {
            int32_t offset;
            memcpy(&offset, code + length, sizeof offset);
            start += offset;
            length += 4;
        }
    }
    Register &first = registers[reg], &second = registers[rm], &last = registers[third & 7];
    switch (opcode << 4 | prefix << 1 | (mod == 3)) {
        case 0x490: return configure(start);                         // LDTILECFG
        case 0x491: memset(registers, 0, sizeof registers); return true;  // TILERELEASE
        case 0x497: return first.rows > 0 && (memset(first.bytes, 0, sizeof first.bytes), true);  // TILEZERO
        case 0x4b6: return first.rows > 0 && (load(first, start, stride), true);   // TILELOADD
        case 0x4b4: return first.rows > 0 && (store(first, start, stride), true);  // TILESTORED
        case 0x5c5: return fit(first, second, last) && (add_bf16(first, second, last), true);   // TDPBF16PS
        case 0x5e3: return fit(first, second, last) && (add_bytes(first, second, last), true);  // TDPBUSD
    }
    return false;
}

void on_illegal(int signal_number, siginfo_t*, void* context_pointer) {
    ucontext_t* context = (ucontext_t*)context_pointer;
    greg_t& at = context->uc_mcontext.gregs[REG_RIP];
    int length;
    follow_processor(context);
    if (execute((const uint8_t*)at, context, length))
        at += length;
    else
        signal(signal_number, SIG_DFL);
}

bool is_told_to(const char* what) {
    const char* told = getenv("AMX_EMULATOR");
    return told && strcmp(told, what) == 0;
}

}  // namespace

extern "C" {

int64_t amx_products() { return num_products; }

// In the place of libc's.
long syscall(long number, ...) {
    va_list list;
    va_start(list, number);
    long a[6];
    for (long& each : a) each = va_arg(list, long);
    va_end(list);
    if (number == SYS_arch_prctl && a[0] == 0x1023) return is_told_to("refuses") ? (errno = EPERM, -1) : 0;
    static long (*const real)(long, ...) = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

__attribute__((constructor)) void emulate() {
    if (is_told_to("refuses") || is_told_to("dies")) return;
    struct sigaction action = {};
    action.sa_sigaction = on_illegal;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGILL, &action, nullptr);
}
}
