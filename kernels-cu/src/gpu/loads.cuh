/* Loads of a given width that the compiler can neither split nor drop. */
#pragma once

#include <stdint.h>

namespace mpk {
namespace gpu {

__device__ __forceinline__ uint4 load_global16(uint64_t address) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
  return v;
}
/* The 16 bytes at `address` + Offset if `valid`, otherwise zeros. In assembly, so that the data stays in the registers
 * into which it was loaded: a move would wait for it. */
template <uint32_t Offset>
__device__ __forceinline__ void load_global16_if(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint64_t address, bool valid) {
  asm volatile(
      "{.reg .pred p; setp.ne.u32 p,%5,0; mov.u32 %0,0; mov.u32 %1,0; mov.u32 %2,0; mov.u32 %3,0;"
      "@p ld.global.v4.u32 {%0,%1,%2,%3},[%4+%6];}"
      : "=&r"(a), "=&r"(b), "=&r"(c), "=&r"(d) : "l"(address), "r"(static_cast<uint32_t>(valid)), "n"(Offset));
}

/* The same for the 8 bytes at `address`. */
__device__ __forceinline__ void load_global8_if(uint32_t& a, uint32_t& b, uint64_t address, bool valid) {
  asm volatile("{.reg .pred p; setp.ne.u32 p,%3,0; mov.u32 %0,0; mov.u32 %1,0; @p ld.global.v2.u32 {%0,%1},[%2];}"
               : "=&r"(a), "=&r"(b) : "l"(address), "r"(static_cast<uint32_t>(valid)));
}

/* The float at `address` + Offset if `valid`, otherwise 0; and the store of a float if `valid`. */
template <uint32_t Offset>
__device__ __forceinline__ void load_global4_if(float& v, uint64_t address, bool valid) {
  asm volatile("{.reg .pred p; setp.ne.u32 p,%2,0; mov.f32 %0,0f00000000; @p ld.global.f32 %0,[%1+%3];}"
               : "=&f"(v) : "l"(address), "r"(static_cast<uint32_t>(valid)), "n"(Offset));
}
template <uint32_t Offset>
__device__ __forceinline__ void store_global4_if(uint64_t address, float v, bool valid) {
  asm volatile("{.reg .pred p; setp.ne.u32 p,%2,0; @p st.global.f32 [%0+%3],%1;}" ::"l"(address), "f"(v), "r"(static_cast<uint32_t>(valid)), "n"(Offset)
               : "memory");
}

__device__ __forceinline__ uint4 load_shared16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
__device__ __forceinline__ uint2 load_shared8(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}
__device__ __forceinline__ void store_shared16(uint32_t address, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0],{%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void store_shared16(uint32_t address, const float (&v)[4]) {
  asm volatile("st.shared.v4.f32 [%0],{%1,%2,%3,%4};" ::"r"(address), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}
__device__ __forceinline__ float load_shared4(uint32_t address) {
  float v;
  asm volatile("ld.shared.f32 %0,[%1];" : "=f"(v) : "r"(address));
  return v;
}

}  // namespace gpu
}  // namespace mpk
