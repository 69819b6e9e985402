/* tq_codebooks.h - GENERATED FILE, DO NOT EDIT.
 *
 * generator : tqtool 0.1.0
 * command   : tqtool gen-codebooks --dims 64,96,128,160 --bits 2,3,4 --law beta
 * method    : Lloyd-Max for Beta(d/2, d/2), the specification's law (--law beta)
 * domain    : unit = u in [0, 1]; centered = t = 2u - 1 in [-1, 1]
 * rotation  : R = H D / sqrt(d), signs D first; inverse D H^T / sqrt(d), Hadamard first
 * tie rule  : index = number of boundaries b with b <= value
 * tail      : unused boundaries are FLT_MAX, unused centroids 0
 * payload   : little-endian, a row: int32 dim, bits, levels; float32 boundaries[15], centroids[16]
 * sha256    : 404bea04281385229d6c8377218a21282932f22292e0d60784b09423ae70fdd3 (all unit rows, then all centered rows)
 */
#ifndef FA_TQ_CODEBOOKS_H
#define FA_TQ_CODEBOOKS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define FA_TQ_CODEBOOKS_VERSION 1 /* of this layout */
#define FA_TQ_CODEBOOKS_CRC32_UNIT UINT32_C(0x4019f199)
#define FA_TQ_CODEBOOKS_CRC32_CENTERED UINT32_C(0xf3e414de)
#define FA_TQ_CODEBOOK_COUNT 12
#define FA_TQ_CODEBOOK_DIM_COUNT 4
#define FA_TQ_CODEBOOK_MAX_BOUNDARIES 15
#define FA_TQ_CODEBOOK_MAX_LEVELS 16

/* A file may include the header for a part of it: what it leaves aside is no reason for a warning. */
#ifndef FA_TQ_CODEBOOK_CONST
#if defined(__GNUC__) || defined(__clang__)
#define FA_TQ_CODEBOOK_CONST static const __attribute__((unused))
#else
#define FA_TQ_CODEBOOK_CONST static const
#endif
#endif

/* FA_TQ_CODEBOOKS_NO_UNIT or FA_TQ_CODEBOOKS_NO_CENTERED, defined before, leaves that domain out. */
#if defined(FA_TQ_CODEBOOKS_NO_UNIT) && defined(FA_TQ_CODEBOOKS_NO_CENTERED)
#error "both domains of the tables are left out"
#endif

#ifndef FA_TQ_CODEBOOK_DEFINED /* an engine may own the struct */
#define FA_TQ_CODEBOOK_DEFINED
typedef struct {
    int bits;
    int levels;
    float boundaries[FA_TQ_CODEBOOK_MAX_BOUNDARIES];
    float centroids[FA_TQ_CODEBOOK_MAX_LEVELS];
} fa_tq_codebook;
#endif

/* The rows are copied and checked as 32-bit words: a size of their own makes the array's length negative. */
typedef char fa_tq_codebook_size_check[sizeof(fa_tq_codebook) == 132 ? 1 : -1];

FA_TQ_CODEBOOK_CONST int fa_tq_codebook_dims[FA_TQ_CODEBOOK_DIM_COUNT] = { 64, 96, 128, 160 };

#ifndef FA_TQ_CODEBOOKS_NO_UNIT
FA_TQ_CODEBOOK_CONST fa_tq_codebook fa_tq_codebooks_unit[FA_TQ_CODEBOOK_COUNT] = {
    /* d = 64, 2 bits: relative squared error 0.114548 */
    { 2, 4,
      {
        0.439462841f, 0.5f, 0.560537159f, 3.40282347e+38f, 3.40282347e+38f,
        3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f,
        3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f
      },
      {
        0.406965554f, 0.471960127f, 0.528039873f, 0.593034446f, 0.0f,
        0.0f, 0.0f, 0.0f, 0.0f, 0.0f,
        0.0f, 0.0f, 0.0f, 0.0f, 0.0f,
        0.0f
      } },
    /* d = 64, 3 bits: relative squared error 0.033400 */
    { 3, 8,
      {
        0.393283844f, 0.435492456f, 0.469161421f, 0.5f, 0.530838609f,
        0.564507544f, 0.606716156f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f,
        3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f
      },
      {
        0.36902383f, 0.417543858f, 0.453441054f, 0.484881759f, 0.515118241f,
        0.546558917f, 0.582456112f, 0.63097614f, 0.0f, 0.0f,
        0.0f, 0.0f, 0.0f, 0.0f, 0.0f,
        0.0f
      } },
    /* d = 64, 4 bits: relative squared error 0.009134 */
    { 4, 16,
      {
        0.355138034f, 0.387895554f, 0.412216842f, 0.432658017f, 0.450924307f,
        0.467894882f, 0.484119296f, 0.5f, 0.515880704f, 0.532105148f,
        0.549075723f, 0.567341983f, 0.587783158f, 0.612104475f, 0.644861996f
      },
      {
        0.335799128f, 0.374476939f, 0.401314169f, 0.423119545f, 0.442196488f,
        0.459652126f, 0.476137608f, 0.492100954f, 0.507899046f, 0.523862362f,
        0.540347874f, 0.557803512f, 0.576880455f, 0.598685801f, 0.62552309f,
        0.664200902f
      } },
    /* d = 96, 2 bits: relative squared error 0.115518 */
    { 2, 4,
      {
        0.450352818f, 0.5f, 0.549647152f, 3.40282347e+38f, 3.40282347e+38f,
        3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f,
        3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f
      },
      {
        0.423670113f, 0.477035552f, 0.522964478f, 0.576329887f, 0.0f,
        0.0f, 0.0f, 0.0f, 0.0f, 0.0f,
        0.0f, 0.0f, 0.0f, 0.0f, 0.0f,
        0.0f
      } },
    /* d = 96, 3 bits: relative squared error 0.033777 */
    { 3, 8,
      {
        0.412191123f, 0.447030663f, 0.474700451f, 0.5f, 0.525299549f,
        0.552969337f, 0.587808847f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f,
        3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f
      },
      {
        0.392119765f, 0.43226251f, 0.461798817f, 0.487602085f, 0.512397885f,
        0.538201153f, 0.56773752f, 0.607880235f, 0.0f, 0.0f,
        0.0f, 0.0f, 0.0f, 0.0f, 0.0f,
        0.0f
      } },
    /* d = 96, 4 bits: relative squared error 0.009255 */
    { 4, 16,
      {
        0.380346686f, 0.407637656f, 0.427781105f, 0.444650531f, 0.459689528f,
        0.473639905f, 0.486964077f, 0.5f, 0.513035893f, 0.526360095f,
        0.540310442f, 0.555349469f, 0.572218895f, 0.592362344f, 0.619653285f
      },
      {
        0.364189982f, 0.396503419f, 0.418771923f, 0.436790317f, 0.452510744f,
        0.466868311f, 0.48041147f, 0.493516684f, 0.506483316f, 0.51958853f,
        0.533131719f, 0.547489226f, 0.563209713f, 0.581228077f, 0.603496611f,
        0.635810018f
      } },
    /* d = 128, 2 bits: relative squared error 0.116006 */
    { 2, 4,
      {
        0.456908762f, 0.5f, 0.543091238f, 3.40282347e+38f, 3.40282347e+38f,
        3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f,
        3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f
      },
      {
        0.433735788f, 0.480081737f, 0.519918263f, 0.566264212f, 0.0f,
        0.0f, 0.0f, 0.0f, 0.0f, 0.0f,
        0.0f, 0.0f, 0.0f, 0.0f, 0.0f,
        0.0f
      } },
    /* d = 128, 3 bits: relative squared error 0.033968 */
    { 3, 8,
      {
        0.423658669f, 0.453996301f, 0.478037566f, 0.5f, 0.521962404f,
        0.546003699f, 0.576341331f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f,
        3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f
      },
      {
        0.406160295f, 0.441157043f, 0.466835588f, 0.489239573f, 0.510760427f,
        0.533164442f, 0.558842957f, 0.593839705f, 0.0f, 0.0f,
        0.0f, 0.0f, 0.0f, 0.0f, 0.0f,
        0.0f
      } },
    /* d = 128, 4 bits: relative squared error 0.009315 */
    { 4, 16,
      {
        0.395770103f, 0.41964674f, 0.437217593f, 0.451905966f, 0.464984894f,
        0.477107465f, 0.488680243f, 0.5f, 0.511319757f, 0.522892535f,
        0.535015106f, 0.548094034f, 0.562782407f, 0.58035326f, 0.604229867f
      },
      {
        0.381614864f, 0.409925371f, 0.429368109f, 0.445067108f, 0.458744824f,
        0.471224964f, 0.482989967f, 0.49437052f, 0.50562948f, 0.517010033f,
        0.528775036f, 0.541255176f, 0.554932892f, 0.570631862f, 0.590074658f,
        0.618385136f
      } },
    /* d = 160, 2 bits: relative squared error 0.116300 */
    { 2, 4,
      {
        0.461406559f, 0.5f, 0.538593471f, 3.40282347e+38f, 3.40282347e+38f,
        3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f,
        3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f
      },
      {
        0.44064492f, 0.482168168f, 0.517831802f, 0.55935508f, 0.0f,
        0.0f, 0.0f, 0.0f, 0.0f, 0.0f,
        0.0f, 0.0f, 0.0f, 0.0f, 0.0f,
        0.0f
      } },
    /* d = 160, 3 bits: relative squared error 0.034083 */
    { 3, 8,
      {
        0.431557834f, 0.458782405f, 0.480327964f, 0.5f, 0.519672036f,
        0.541217625f, 0.568442166f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f,
        3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f
      },
      {
        0.415843934f, 0.447271764f, 0.470293045f, 0.490362912f, 0.509637117f,
        0.529706955f, 0.552728236f, 0.584156096f, 0.0f, 0.0f,
        0.0f, 0.0f, 0.0f, 0.0f, 0.0f,
        0.0f
      } },
    /* d = 160, 4 bits: relative squared error 0.009352 */
    { 4, 16,
      {
        0.406444609f, 0.427932143f, 0.443716466f, 0.456896961f, 0.468624741f,
        0.479489744f, 0.489858955f, 0.5f, 0.510141075f, 0.520510256f,
        0.531375289f, 0.543103039f, 0.556283534f, 0.572067857f, 0.593555391f
      },
      {
        0.393694937f, 0.419194281f, 0.436670035f, 0.450762928f, 0.463030994f,
        0.474218488f, 0.484761f, 0.494956881f, 0.505043149f, 0.515239f,
        0.525781512f, 0.536969006f, 0.549237072f, 0.563329935f, 0.580805719f,
        0.606305063f
      } }
};
#endif

#ifndef FA_TQ_CODEBOOKS_NO_CENTERED
FA_TQ_CODEBOOK_CONST fa_tq_codebook fa_tq_codebooks_centered[FA_TQ_CODEBOOK_COUNT] = {
    /* d = 64, 2 bits: relative squared error 0.114548 */
    { 2, 4,
      {
        -0.121074311f, 0.0f, 0.121074311f, 3.40282347e+38f, 3.40282347e+38f,
        3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f,
        3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f
      },
      {
        -0.186068878f, -0.0560797453f, 0.0560797453f, 0.186068878f, 0.0f,
        0.0f, 0.0f, 0.0f, 0.0f, 0.0f,
        0.0f, 0.0f, 0.0f, 0.0f, 0.0f,
        0.0f
      } },
    /* d = 64, 3 bits: relative squared error 0.033400 */
    { 3, 8,
      {
        -0.213432297f, -0.129015073f, -0.0616771653f, 0.0f, 0.0616771653f,
        0.129015073f, 0.213432297f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f,
        3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f
      },
      {
        -0.261952311f, -0.164912283f, -0.0931178704f, -0.0302364584f, 0.0302364584f,
        0.0931178704f, 0.164912283f, 0.261952311f, 0.0f, 0.0f,
        0.0f, 0.0f, 0.0f, 0.0f, 0.0f,
        0.0f
      } },
    /* d = 64, 4 bits: relative squared error 0.009134 */
    { 4, 16,
      {
        -0.289723963f, -0.224208906f, -0.175566301f, -0.134683967f, -0.0981513858f,
        -0.0642102659f, -0.0317614228f, 0.0f, 0.0317614228f, 0.0642102659f,
        0.0981513858f, 0.134683967f, 0.175566301f, 0.224208906f, 0.289723963f
      },
      {
        -0.328401774f, -0.251046151f, -0.197371662f, -0.153760925f, -0.115607008f,
        -0.0806957632f, -0.0477247648f, -0.0157980807f, 0.0157980807f, 0.0477247648f,
        0.0806957632f, 0.115607008f, 0.153760925f, 0.197371662f, 0.251046151f,
        0.328401774f
      } },
    /* d = 96, 2 bits: relative squared error 0.115518 */
    { 2, 4,
      {
        -0.0992943496f, 0.0f, 0.0992943496f, 3.40282347e+38f, 3.40282347e+38f,
        3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f,
        3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f
      },
      {
        -0.152659789f, -0.0459289029f, 0.0459289029f, 0.152659789f, 0.0f,
        0.0f, 0.0f, 0.0f, 0.0f, 0.0f,
        0.0f, 0.0f, 0.0f, 0.0f, 0.0f,
        0.0f
      } },
    /* d = 96, 3 bits: relative squared error 0.033777 */
    { 3, 8,
      {
        -0.175617725f, -0.105938673f, -0.0505990833f, 0.0f, 0.0505990833f,
        0.105938673f, 0.175617725f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f,
        3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f
      },
      {
        -0.215760455f, -0.135474995f, -0.0764023438f, -0.0247958209f, 0.0247958209f,
        0.0764023438f, 0.135474995f, 0.215760455f, 0.0f, 0.0f,
        0.0f, 0.0f, 0.0f, 0.0f, 0.0f,
        0.0f
      } },
    /* d = 96, 4 bits: relative squared error 0.009255 */
    { 4, 16,
      {
        -0.239306599f, -0.184724659f, -0.14443776f, -0.110698938f, -0.0806209445f,
        -0.052720204f, -0.0260718334f, 0.0f, 0.0260718334f, 0.052720204f,
        0.0806209445f, 0.110698938f, 0.14443776f, 0.184724659f, 0.239306599f
      },
      {
        -0.271620035f, -0.206993178f, -0.162456155f, -0.12641938f, -0.0949785039f,
        -0.0662633777f, -0.0391770303f, -0.0129666356f, 0.0129666356f, 0.0391770303f,
        0.0662633777f, 0.0949785039f, 0.12641938f, 0.162456155f, 0.206993178f,
        0.271620035f
      } },
    /* d = 128, 2 bits: relative squared error 0.116006 */
    { 2, 4,
      {
        -0.0861824676f, 0.0f, 0.0861824676f, 3.40282347e+38f, 3.40282347e+38f,
        3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f,
        3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f
      },
      {
        -0.132528409f, -0.0398365147f, 0.0398365147f, 0.132528409f, 0.0f,
        0.0f, 0.0f, 0.0f, 0.0f, 0.0f,
        0.0f, 0.0f, 0.0f, 0.0f, 0.0f,
        0.0f
      } },
    /* d = 128, 3 bits: relative squared error 0.033968 */
    { 3, 8,
      {
        -0.152682677f, -0.0920073912f, -0.0439248569f, 0.0f, 0.0439248569f,
        0.0920073912f, 0.152682677f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f,
        3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f
      },
      {
        -0.18767941f, -0.117685944f, -0.0663288459f, -0.0215208679f, 0.0215208679f,
        0.0663288459f, 0.117685944f, 0.18767941f, 0.0f, 0.0f,
        0.0f, 0.0f, 0.0f, 0.0f, 0.0f,
        0.0f
      } },
    /* d = 128, 4 bits: relative squared error 0.009315 */
    { 4, 16,
      {
        -0.20845978f, -0.160706535f, -0.125564784f, -0.0961880833f, -0.0700302199f,
        -0.0457850769f, -0.0226395186f, 0.0f, 0.0226395186f, 0.0457850769f,
        0.0700302199f, 0.0961880833f, 0.125564784f, 0.160706535f, 0.20845978f
      },
      {
        -0.236770272f, -0.180149287f, -0.141263783f, -0.109865807f, -0.0825103596f,
        -0.0575500764f, -0.0340200774f, -0.0112589588f, 0.0112589588f, 0.0340200774f,
        0.0575500764f, 0.0825103596f, 0.109865807f, 0.141263783f, 0.180149287f,
        0.236770272f
      } },
    /* d = 160, 2 bits: relative squared error 0.116300 */
    { 2, 4,
      {
        -0.0771869123f, 0.0f, 0.0771869123f, 3.40282347e+38f, 3.40282347e+38f,
        3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f,
        3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f
      },
      {
        -0.118710183f, -0.0356636383f, 0.0356636383f, 0.118710183f, 0.0f,
        0.0f, 0.0f, 0.0f, 0.0f, 0.0f,
        0.0f, 0.0f, 0.0f, 0.0f, 0.0f,
        0.0f
      } },
    /* d = 160, 3 bits: relative squared error 0.034083 */
    { 3, 8,
      {
        -0.136884317f, -0.082435213f, -0.0393440649f, 0.0f, 0.0393440649f,
        0.082435213f, 0.136884317f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f,
        3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f, 3.40282347e+38f
      },
      {
        -0.168312147f, -0.105456494f, -0.0594139285f, -0.019274205f, 0.019274205f,
        0.0594139285f, 0.105456494f, 0.168312147f, 0.0f, 0.0f,
        0.0f, 0.0f, 0.0f, 0.0f, 0.0f,
        0.0f
      } },
    /* d = 160, 4 bits: relative squared error 0.009352 */
    { 4, 16,
      {
        -0.187110797f, -0.144135684f, -0.112567037f, -0.0862060934f, -0.0627505258f,
        -0.0410205014f, -0.0202821139f, 0.0f, 0.0202821139f, 0.0410205014f,
        0.0627505258f, 0.0862060934f, 0.112567037f, 0.144135684f, 0.187110797f
      },
      {
        -0.21261014f, -0.161611453f, -0.12665993f, -0.0984741524f, -0.0739380345f,
        -0.0515630171f, -0.0304779876f, -0.0100862412f, 0.0100862412f, 0.0304779876f,
        0.0515630171f, 0.0739380345f, 0.0984741524f, 0.12665993f, 0.161611453f,
        0.21261014f
      } }
};
#endif

/* Return the row of the tables for vectors of length dim at so many bits, -1 if there is none. */
static inline int fa_tq_codebook_index(int dim, int bits)
{
    const int widths = FA_TQ_CODEBOOK_COUNT / FA_TQ_CODEBOOK_DIM_COUNT;
    int row;
#ifdef FA_TQ_CODEBOOKS_NO_CENTERED
    const fa_tq_codebook *tables = fa_tq_codebooks_unit;
#else
    const fa_tq_codebook *tables = fa_tq_codebooks_centered;
#endif
    for (row = 0; row < FA_TQ_CODEBOOK_COUNT; ++row) {
        if (fa_tq_codebook_dims[row / widths] == dim && tables[row].bits == bits) {
            return row;
        }
    }
    return -1;
}

#ifndef FA_TQ_CODEBOOKS_NO_UNIT
/* Return the table for values u in [0, 1], NULL if there is none. */
static inline const fa_tq_codebook *fa_tq_codebook_find(int dim, int bits)
{
    const int row = fa_tq_codebook_index(dim, bits);
    return row < 0 ? NULL : &fa_tq_codebooks_unit[row];
}
#endif

#ifndef FA_TQ_CODEBOOKS_NO_CENTERED
/* Return the table for values t in [-1, 1], NULL if there is none: this one is exactly odd-symmetric. */
static inline const fa_tq_codebook *fa_tq_codebook_find_centered(int dim, int bits)
{
    const int row = fa_tq_codebook_index(dim, bits);
    return row < 0 ? NULL : &fa_tq_codebooks_centered[row];
}
#endif

/* Take the 32 bits of a word into a CRC-32, lowest first: its bytes in little-endian order on any machine. */
static inline uint32_t fa_tq_codebooks_crc32_word(uint32_t crc, uint32_t word)
{
    int bit;
    for (bit = 0; bit < 32; ++bit) {
        const uint32_t odd = (crc ^ (word >> bit)) & 1u;
        crc = (crc >> 1) ^ (odd ? UINT32_C(0xedb88320) : UINT32_C(0));
    }
    return crc;
}

/* Return the CRC-32 of compiled tables: FA_TQ_CODEBOOKS_CRC32_UNIT or _CENTERED if nothing has changed them. */
static inline uint32_t fa_tq_codebooks_crc32(const fa_tq_codebook *tables)
{
    const int widths = FA_TQ_CODEBOOK_COUNT / FA_TQ_CODEBOOK_DIM_COUNT;
    uint32_t crc = UINT32_C(0xffffffff);
    int row;
    int i;
    for (row = 0; row < FA_TQ_CODEBOOK_COUNT; ++row) {
        const fa_tq_codebook *table = &tables[row];
        uint32_t word;
        crc = fa_tq_codebooks_crc32_word(crc, (uint32_t)fa_tq_codebook_dims[row / widths]);
        crc = fa_tq_codebooks_crc32_word(crc, (uint32_t)table->bits);
        crc = fa_tq_codebooks_crc32_word(crc, (uint32_t)table->levels);
        for (i = 0; i < FA_TQ_CODEBOOK_MAX_BOUNDARIES; ++i) {
            memcpy(&word, &table->boundaries[i], sizeof word);
            crc = fa_tq_codebooks_crc32_word(crc, word);
        }
        for (i = 0; i < FA_TQ_CODEBOOK_MAX_LEVELS; ++i) {
            memcpy(&word, &table->centroids[i], sizeof word);
            crc = fa_tq_codebooks_crc32_word(crc, word);
        }
    }
    return crc ^ UINT32_C(0xffffffff);
}

#endif
